"""An upstream finds out what its server can do, with few requests, and does not ask again and again."""

import asyncio
from collections.abc import Mapping

import pytest
from msgspec import structs

from motet.engines.upstream.text_source import TextRoute
from motet.engines.upstream.text_upstream import AGAIN_S, TextUpstream
from motet.engines.upstream.upstream_server import RouteAbilities, UpstreamOptions, probe
from motet.errors import EngineDiedError
from tests.engines.upstream.asking import ROUTES, playing, request_for
from tests.patience import PATIENCE_S
from tests.peers.openai_script import CHAT, COMPLETIONS, Asked, Index, Manners, Refused

pytestmark = pytest.mark.anyio

ALL = RouteAbilities(honours_n=True, takes_usage=True)
SINGLES = RouteAbilities(takes_usage=True)


def on_routes(chat: RouteAbilities, completions: RouteAbilities) -> Mapping[TextRoute, RouteAbilities]:
    return {TextRoute.CHAT: chat, TextRoute.COMPLETIONS: completions}


FOUND = {
    "correct": (Manners(), on_routes(ALL, ALL)),
    "n ignored": (Manners(ignores_n=True), on_routes(SINGLES, SINGLES)),
    "all numbered 0": (Manners(index=Index.ZERO), on_routes(SINGLES, SINGLES)),
    "no numbers": (Manners(index=Index.ABSENT), on_routes(SINGLES, SINGLES)),
    "n refused": (Manners(refuses=frozenset({"n"})), on_routes(SINGLES, SINGLES)),
    "no stream_options": (
        Manners(refuses=frozenset({"stream_options"})),
        on_routes(RouteAbilities(honours_n=True), RouteAbilities(honours_n=True)),
    ),
    "max_completion_tokens": (
        Manners(refuses=frozenset({"max_tokens"})),
        on_routes(ALL, RouteAbilities()),  # completions have no other name for it
    ),
    "no completions": (Manners(no_routes=frozenset({COMPLETIONS})), on_routes(ALL, RouteAbilities(there=False))),
    "nothing there": (Manners(no_routes=frozenset({CHAT, COMPLETIONS})), None),
    "server error": (Manners(not_ok=[Refused(500)]), None),
    "too many requests": (Manners(not_ok=[Refused(429)]), None),
    "another key": (Manners(key="k"), None),
    "not JSON": (Manners(not_ok=[Refused(200, b"<html>hello</html>", (("content-type", "text/html"),))]), None),
}


@pytest.mark.parametrize("name", list(FOUND))
async def test_a_probe_finds_out_what_a_server_can_do(name: str) -> None:
    manners, expected = FOUND[name]
    async with playing(learn=False) as played:
        played.peer.manners = manners
        assert await probe(played.upstream.server, "m") == expected
        assert len(played.peer.asked) <= 16
        assert all(
            (asked.body.get("max_tokens") or asked.body["max_completion_tokens"]) == 1 for asked in played.peer.asked
        )


async def test_a_probe_that_is_not_answered_in_time_finds_nothing() -> None:
    async with playing(gated=True) as played:
        assert await probe(played.upstream.server, "m", limit_s=0.01) is None


async def test_a_server_of_several_models_is_probed_at_the_first_request_with_n_above_1() -> None:
    manners = Manners(models=({"id": "m"}, {"id": "other"}, {"id": "adapter", "parent": "m"}))
    async with playing(manners) as played:
        await played.ask(request_for(n=1))
        assert [asked.body["model"] for asked in played.peer.asked] == ["m"]  # so far there was no probe
        asked: list[Asked] = []
        while [request.body.get("n") for request in asked] != [2]:  # single requests until the probe has ended
            played.peer.asked.clear()
            await played.ask(request_for(n=2))
            asked = [request for request in played.peer.asked if "max_tokens" not in request.body]
        played.peer.asked.clear()
        await played.ask(structs.replace(request_for(n=2), model="adapter"))
        assert [(request.body["model"], request.body.get("n")) for request in played.peer.asked] == [("adapter", 2)]


async def test_a_probe_never_has_a_clients_key() -> None:
    manners = Manners(models=({"id": "m"}, {"id": "other"}))
    async with playing(manners, options=UpstreamOptions(pass_key=True)) as played:
        asked: list[Asked] = []
        while [request.body.get("n") for request in asked] != [2]:  # single requests until the probe has ended
            await played.ask(structs.replace(request_for(n=2), authorization="Bearer client"))
            asked = [request for request in played.peer.asked if "max_tokens" not in request.body][-1:]
        probes = [request for request in played.peer.asked if "max_tokens" in request.body]
        assert {request.headers.get("authorization") for request in probes} == {None}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_failed_probe_is_repeated_after_a_while(route: TextRoute) -> None:
    now_s = 1000.0
    async with playing(Manners(ignores_n=True), learn=False) as played:
        upstream = TextUpstream(played.upstream.server, await played.upstream.server.report(), clock=lambda: now_s)
        played.peer.manners.not_ok.append(Refused(500))
        await upstream.learn()
        assert len(played.peer.asked) == 1
        await upstream.learn()  # not so soon
        assert len(played.peer.asked) == 1
        now_s += AGAIN_S
        await upstream.learn()
        assert len(played.peer.asked) > 1
        await upstream.close()


async def test_reports_ask_for_no_answers() -> None:
    async with playing(learn=False) as played:
        for _ in range(3):
            await played.upstream.server.report()
        assert played.peer.asked == []
        assert played.peer.listed == 4


async def test_a_probe_that_ends_with_its_server_says_nothing_about_the_next_server() -> None:
    """The bug: the next server got single requests for a minute."""
    async with playing(gated=True, learn=False) as played:
        learning = asyncio.create_task(played.upstream.learn())
        await played.peer.arrived.acquire()
        played.upstream.lost(EngineDiedError("gone"))
        async with asyncio.timeout(PATIENCE_S):
            await learning
        played.peer.gate = None
        await played.upstream.learn()
        played.peer.asked.clear()
        await played.ask(request_for(n=2))
        assert [asked.body["n"] for asked in played.peer.asked] == [2]
