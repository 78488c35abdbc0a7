"""What a server can is found out from what it answers, in few requests, and not again and again."""

import pytest
from msgspec import structs

from motet.engines.upstream.base import TextRoute
from motet.engines.upstream.client import Ids
from motet.engines.upstream.probe import Abilities, Ability, probe
from motet.engines.upstream.upstream import AGAIN_S, TextUpstream
from tests.engines.upstream.asking import ROUTES, playing, request_for
from tests.peers.openai_script import CHAT, COMPLETIONS, Index, Manners, Refused

pytestmark = pytest.mark.anyio

ALL = Ability(honours_n=True, takes_usage=True)
SINGLES = Ability(takes_usage=True)

FOUND = {
    "honest": (Manners(), Abilities(chat=ALL, completions=ALL)),
    "n ignored": (Manners(ignores_n=True), Abilities(chat=SINGLES, completions=SINGLES)),
    "all numbered 0": (Manners(index=Index.ZERO), Abilities(chat=SINGLES, completions=SINGLES)),
    "no numbers": (Manners(index=Index.ABSENT), Abilities(chat=SINGLES, completions=SINGLES)),
    "n refused": (Manners(refuses=frozenset({"n"})), Abilities(chat=SINGLES, completions=SINGLES)),
    "no stream_options": (
        Manners(refuses=frozenset({"stream_options"})),
        Abilities(chat=Ability(honours_n=True), completions=Ability(honours_n=True)),
    ),
    "max_completion_tokens": (
        Manners(refuses=frozenset({"max_tokens"})),
        Abilities(chat=ALL, completions=Ability()),  # completions have no other word for it
    ),
    "no completions": (
        Manners(no_routes=frozenset({COMPLETIONS})),
        Abilities(chat=ALL, completions=Ability(there=False)),
    ),
    "nothing there": (Manners(no_routes=frozenset({CHAT, COMPLETIONS})), None),
    "server error": (Manners(not_ok=[Refused(500)]), None),
    "too many requests": (Manners(not_ok=[Refused(429)]), None),
    "another key": (Manners(key="k"), None),
    "not JSON": (Manners(not_ok=[Refused(200, b"<html>hello</html>", (("content-type", "text/html"),))]), None),
}


@pytest.mark.parametrize("name", list(FOUND))
async def test_what_a_server_can_is_found_out(name: str) -> None:
    manners, expected = FOUND[name]
    async with playing(learn=False) as played:
        played.peer.manners = manners
        assert await probe(played.upstream.server, "m", ids=Ids()) == expected
        assert len(played.peer.asked) <= 16
        assert all(
            (asked.body.get("max_tokens") or asked.body["max_completion_tokens"]) == 1 for asked in played.peer.asked
        )


async def test_a_server_that_does_not_answer_in_time_leaves_it_unknown() -> None:
    async with playing(gated=True) as played:
        assert await probe(played.upstream.server, "m", ids=Ids(), limit_s=0.01) is None


async def test_a_server_of_several_models_is_asked_when_one_is_first_wanted_for_several_choices() -> None:
    manners = Manners(models=({"id": "m"}, {"id": "other"}, {"id": "adapter", "parent": "m"}))
    async with playing(manners) as played:
        await played.ask(request_for(n=1))
        assert [asked.body["model"] for asked in played.peer.asked] == ["m"]  # so far nobody was asked
        await played.ask(request_for(n=2))
        await played.upstream.learned()
        played.peer.asked.clear()
        await played.ask(request_for(n=2))
        assert [asked.body["n"] for asked in played.peer.asked] == [2]
        await played.ask(structs.replace(request_for(n=2), model="adapter"))
        assert [(asked.body["model"], asked.body.get("n")) for asked in played.peer.asked[1:]] == [("adapter", 2)]


@pytest.mark.parametrize("route", ROUTES)
async def test_what_could_not_be_found_out_is_asked_again_after_a_while(route: TextRoute) -> None:
    now_s = 1000.0
    async with playing(Manners(ignores_n=True), learn=False) as played:
        upstream = TextUpstream(played.upstream.server, await played.upstream.report(), clock=lambda: now_s)
        played.peer.manners.not_ok.append(Refused(500))
        await upstream.learn()
        assert len(played.peer.asked) == 1
        await upstream.learn()  # not so soon
        assert len(played.peer.asked) == 1
        now_s += AGAIN_S
        await upstream.learn()
        assert len(played.peer.asked) > 1
        await upstream.close()


async def test_reports_do_not_ask_for_choices() -> None:
    async with playing(learn=False) as played:
        for _ in range(3):
            await played.upstream.report()
        assert played.peer.asked == []
        assert played.peer.listed == 4
