"""An upstream determines the abilities of its server, with few requests that are not repeated without need."""

import asyncio
from collections.abc import Mapping

import pytest
from msgspec import structs

from motet.engines.upstream.text_source import TextRoute
from motet.engines.upstream.text_upstream import PROBE_AGAIN_S, TextUpstream
from motet.engines.upstream.upstream_server import RouteAbilities, UpstreamOptions, probe
from motet.errors import EngineDiedError
from tests.engines.upstream.fake_upstream import ROUTES, fake_upstream, request_for
from tests.patience import PATIENCE_S
from tests.peers.openai_script import CHAT, COMPLETIONS, Behaviour, FixedAnswer, Index, OpenAIRequest

pytestmark = pytest.mark.anyio

ALL = RouteAbilities(honours_n=True, takes_usage=True)
SINGLES = RouteAbilities(takes_usage=True)


def on_routes(chat: RouteAbilities, completions: RouteAbilities) -> Mapping[TextRoute, RouteAbilities]:
    return {TextRoute.CHAT: chat, TextRoute.COMPLETIONS: completions}


FOUND = {
    "correct": (Behaviour(), on_routes(ALL, ALL)),
    "n ignored": (Behaviour(ignores_n=True), on_routes(SINGLES, SINGLES)),
    "all numbered 0": (Behaviour(index=Index.ZERO), on_routes(SINGLES, SINGLES)),
    "no numbers": (Behaviour(index=Index.ABSENT), on_routes(SINGLES, SINGLES)),
    "n refused": (Behaviour(refuses=frozenset({"n"})), on_routes(SINGLES, SINGLES)),
    "no stream_options": (
        Behaviour(refuses=frozenset({"stream_options"})),
        on_routes(RouteAbilities(honours_n=True), RouteAbilities(honours_n=True)),
    ),
    "max_completion_tokens": (
        Behaviour(refuses=frozenset({"max_tokens"})),
        on_routes(ALL, RouteAbilities()),  # completions have no other field for the limit
    ),
    "no completions": (Behaviour(no_routes=frozenset({COMPLETIONS})), on_routes(ALL, RouteAbilities(exists=False))),
    "no routes": (Behaviour(no_routes=frozenset({CHAT, COMPLETIONS})), None),
    "server error": (Behaviour(next_errors=[FixedAnswer(500)]), None),
    "too many requests": (Behaviour(next_errors=[FixedAnswer(429)]), None),
    "another key": (Behaviour(key="k"), None),
    "not JSON": (
        Behaviour(next_errors=[FixedAnswer(200, b"<html>hello</html>", (("content-type", "text/html"),))]),
        None,
    ),
}


@pytest.mark.parametrize("name", list(FOUND))
async def test_a_probe_determines_the_abilities_of_a_server(name: str) -> None:
    behaviour, expected = FOUND[name]
    async with fake_upstream(learn=False) as fake:
        fake.peer.behaviour = behaviour
        assert await probe(fake.upstream.server, "m") == expected
        assert len(fake.peer.requests) <= 16
        assert all(
            (request.body.get("max_tokens") or request.body["max_completion_tokens"]) == 1
            for request in fake.peer.requests
        )


async def test_a_probe_without_an_answer_in_time_has_no_result() -> None:
    async with fake_upstream(gated=True) as fake:
        assert await probe(fake.upstream.server, "m", limit_s=0.01) is None


async def test_a_server_of_several_models_is_probed_at_the_first_request_with_n_above_1() -> None:
    behaviour = Behaviour(models=({"id": "m"}, {"id": "other"}, {"id": "adapter", "parent": "m"}))
    async with fake_upstream(behaviour) as fake:
        await fake.answer(request_for(n=1))
        assert [request.body["model"] for request in fake.peer.requests] == ["m"]  # so far there was no probe
        received: list[OpenAIRequest] = []
        while [request.body.get("n") for request in received] != [2]:  # single requests until the probe has ended
            fake.peer.requests.clear()
            await fake.answer(request_for(n=2))
            received = [request for request in fake.peer.requests if "max_tokens" not in request.body]
        fake.peer.requests.clear()
        await fake.answer(structs.replace(request_for(n=2), model="adapter"))
        assert [(request.body["model"], request.body.get("n")) for request in fake.peer.requests] == [("adapter", 2)]


async def test_a_probe_never_has_a_clients_key() -> None:
    behaviour = Behaviour(models=({"id": "m"}, {"id": "other"}))
    async with fake_upstream(behaviour, options=UpstreamOptions(pass_key=True)) as fake:
        received: list[OpenAIRequest] = []
        while [request.body.get("n") for request in received] != [2]:  # single requests until the probe has ended
            await fake.answer(structs.replace(request_for(n=2), authorization="Bearer client"))
            received = [request for request in fake.peer.requests if "max_tokens" not in request.body][-1:]
        probes = [request for request in fake.peer.requests if "max_tokens" in request.body]
        assert {request.headers.get("authorization") for request in probes} == {None}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_failed_probe_is_repeated_after_a_while(route: TextRoute) -> None:
    now_s = 1000.0
    async with fake_upstream(Behaviour(ignores_n=True), learn=False) as fake:
        upstream = TextUpstream(fake.upstream.server, await fake.upstream.server.report(), clock=lambda: now_s)
        fake.peer.behaviour.next_errors.append(FixedAnswer(500))
        await upstream.learn_abilities()
        assert len(fake.peer.requests) == 1
        await upstream.learn_abilities()  # has no effect yet
        assert len(fake.peer.requests) == 1
        now_s += PROBE_AGAIN_S
        await upstream.learn_abilities()
        assert len(fake.peer.requests) > 1
        await upstream.close()


async def test_reports_request_no_answers() -> None:
    async with fake_upstream(learn=False) as fake:
        for _ in range(3):
            await fake.upstream.server.report()
        assert fake.peer.requests == []
        assert fake.peer.num_listings == 4


async def test_a_probe_that_ends_with_its_server_says_nothing_about_the_next_server() -> None:
    """The bug: the next server got single requests for a minute."""
    async with fake_upstream(gated=True, learn=False) as fake:
        learning = asyncio.create_task(fake.upstream.learn_abilities())
        await fake.peer.arrived.acquire()
        fake.upstream.lost(EngineDiedError("gone"))
        async with asyncio.timeout(PATIENCE_S):
            await learning
        fake.peer.gate = None
        await fake.upstream.learn_abilities()
        fake.peer.requests.clear()
        await fake.answer(request_for(n=2))
        assert [request.body["n"] for request in fake.peer.requests] == [2]
