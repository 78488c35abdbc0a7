"""A prefill server as an engine: what it is asked, what comes back, and what its errors mean here."""

import asyncio
import json

import httpx
import pytest

from motet.config import ServerConfig
from motet.engines.base import Worker
from motet.engines.fake import FakeEngine, fake_info
from motet.errors import EngineClosedError, EngineDiedError, EngineError
from motet.routing.bypass import BypassRules
from motet.routing.disaggregate import Disaggregated
from motet.routing.fleet import Fleet
from motet.routing.routed import Routed
from motet.types import EngineStats, GenerateRequest, Role
from tests.api.serving import MODEL, Served, Serving, WatchedEngine
from tests.engines.remote.far import (
    DECODE_INFO,
    TICKET,
    URL,
    Released,
    Scripted,
    refused,
    remote,
    request,
    status_of,
    with_ticket,
)
from tests.routing.cell import answer, group, script, tokens_of

pytestmark = pytest.mark.anyio


async def test_a_group_is_one_call_with_one_choice_and_its_ticket_comes_back(
    prefill_server: Served, client: httpx.AsyncClient
) -> None:
    engine = remote(client, url=f"{prefill_server.url}/v1/")
    ticket = await engine.prefill(request(n=8), readers=2)
    far = prefill_server.engine
    assert list(far.leases.held.values()) == [ticket]
    assert (ticket.num_tokens, ticket.readers) == (3, 2)
    (asked,) = far.prefills
    assert asked.prompt == request().prompt
    assert len(asked.choices) == 1
    assert (asked.cache_salt, asked.priority) == ("salt", 3)
    assert (asked.trace, asked.session_id) == ("trace-1", "session-1")
    assert engine.info.transfer == ticket.address
    far.leases.end(ticket)


async def test_the_body_holds_token_ids_and_nothing_of_the_answer() -> None:
    server = Scripted(with_ticket)
    assert await remote(server.client).prefill(request()) == TICKET
    (asked,) = server.asked
    assert json.loads(asked.content) == {
        "request_id": "group-1",
        "token_ids": [5, 6, 7, 8],
        "sampling_params": {"n": 1, "max_tokens": 1},
        "stream": False,
        "cache_salt": "salt",
        "priority": 3,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "readers": 1},
    }
    assert asked.headers["x-request-id"] == "trace-1"
    assert asked.headers["x-session-id"] == "session-1"
    assert "authorization" not in asked.headers


async def test_ids_that_are_not_there_are_not_sent() -> None:
    server = Scripted(with_ticket)
    await remote(server.client).prefill(request(trace="", session_id=""))
    assert not {"x-request-id", "x-session-id"} & server.asked[0].headers.keys()


@pytest.mark.parametrize(("given", "sent"), [("a\r\nb\x00", "ab"), (" a\x7f\u2028 ", "a"), ("\n", ""), ("gr\xfcn", "")])
async def test_no_id_of_a_client_can_fail_the_call(
    prefill_server: Served, client: httpx.AsyncClient, given: str, sent: str
) -> None:
    """What no header may hold is left out: HTTP would refuse it here, which must not look like a dead server."""
    engine = remote(client, url=prefill_server.url)
    ticket = await engine.prefill(request(trace=given, session_id=given))
    (asked,) = prefill_server.engine.prefills
    assert asked.session_id == sent
    assert asked.trace == (sent or "group-1")
    prefill_server.engine.leases.end(ticket)


async def test_cancelling_closes_the_call_and_the_server_frees_everything(
    serve: Serving, client: httpx.AsyncClient
) -> None:
    begun = asyncio.Event()

    async def for_ever(_: GenerateRequest) -> None:
        begun.set()
        await asyncio.Event().wait()

    server = await serve(engine=WatchedEngine(role=Role.PREFILL, during_prefill=for_ever))
    call = asyncio.ensure_future(remote(client, url=server.url).prefill(request()))
    await begun.wait()
    assert server.engine.prefilling == 1
    call.cancel()
    await asyncio.wait([call])
    await server.until_empty()


@pytest.mark.parametrize("missing", [404, 405])
async def test_a_server_without_the_route_for_token_ids_is_asked_for_completions_from_then_on(missing: int) -> None:
    def completions_only(asked: httpx.Request) -> httpx.Response:
        if asked.url.path != "/v1/completions":
            return refused(missing, "Invalid URL", "unknown_url")
        return with_ticket(asked)

    server = Scripted(completions_only)
    engine = remote(server.client)
    for _ in range(2):
        assert await engine.prefill(request()) == TICKET
    assert server.paths == ["/inference/v1/generate", "/v1/completions", "/v1/completions"]
    assert json.loads(server.asked[-1].content) == {
        "prompt": [5, 6, 7, 8],
        "n": 1,
        "max_tokens": 1,
        "stream": False,
        "cache_salt": "salt",
        "priority": 3,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "readers": 1},
    }


async def test_two_calls_that_find_the_route_missing_at_once_both_go_on() -> None:
    both_asked = asyncio.Barrier(2)

    async def completions_only(asked: httpx.Request) -> httpx.Response:
        if asked.url.path == "/v1/completions":
            return with_ticket(asked)
        await both_asked.wait()
        return httpx.Response(404)

    engine = remote(httpx.AsyncClient(transport=httpx.MockTransport(completions_only)))
    assert await asyncio.gather(*(engine.prefill(request()) for _ in range(2))) == [TICKET, TICKET]


async def test_a_server_with_neither_route_is_quoted() -> None:
    server = Scripted(lambda _: refused(404, "Invalid URL (POST /v1/completions)", "unknown_url"))
    with pytest.raises(EngineError, match=r"prefill\.test answered 404: Invalid URL"):
        await remote(server.client).prefill(request())


async def test_completions_of_our_own_take_the_same_prompt(prefill_server: Served, client: httpx.AsyncClient) -> None:
    def forward(asked: httpx.Request) -> httpx.Response:
        if asked.url.path != "/v1/completions":
            return httpx.Response(404)
        bodies.append(asked.content)
        return with_ticket(asked)

    bodies: list[bytes] = []
    await remote(Scripted(forward).client).prefill(request())
    response = await client.post(f"{prefill_server.url}/v1/completions", content=bodies[0])
    assert response.status_code == 200, response.text
    assert prefill_server.engine.prefills[0].prompt == request().prompt
    prefill_server.engine.leases.held.clear()


async def test_the_key_is_sent(serve: Serving, client: httpx.AsyncClient) -> None:
    config = ServerConfig(served_model_name=MODEL, api_keys=("secret",))
    server = await serve(engine=WatchedEngine(role=Role.PREFILL), config=config)
    with pytest.raises(EngineError, match="--prefill-api-key"):
        await remote(client, url=server.url).prefill(request())
    await remote(client, url=server.url, api_key="secret").prefill(request())
    assert (await remote(client, url=server.url, api_key="secret").stats()).groups_running == 0
    server.engine.leases.held.clear()


async def test_a_ticket_is_given_back_through_the_side_channel() -> None:
    server, released = Scripted(with_ticket), Released()
    engine = remote(server.client, release_through=released)
    await engine.release(TICKET)
    assert released.tickets == [TICKET]
    assert server.asked == []


async def test_it_generates_nothing() -> None:
    server = Scripted(with_ticket)
    engine = remote(server.client)
    stream = engine.generate(request())
    with pytest.raises(EngineError, match="for prefill only"):
        await anext(stream)
    await stream.aclose()
    await engine.stop_choice(request().request_id, 0)
    assert server.asked == []


async def test_its_info_is_that_of_the_decode_engine_in_the_role_of_prefill() -> None:
    info = remote(Scripted(with_ticket).client).info
    assert (info.role, info.pid, info.transfer) == (Role.PREFILL, None, None)
    assert info.model == DECODE_INFO.model


async def test_its_figures_are_those_of_its_status() -> None:
    engine = remote(Scripted(lambda _: status_of(None)).client)
    assert await engine.stats() == EngineStats(leases=2, prefills=5, prefill_tokens=700)


async def test_our_own_status_is_understood(prefill_server: Served, client: httpx.AsyncClient) -> None:
    engine = remote(client, url=prefill_server.url)
    ticket = await engine.prefill(request())
    stats = await engine.stats()
    assert (stats.leases, stats.prefills, stats.blocks_total) == (1, 1, 1024)
    prefill_server.engine.leases.end(ticket)


@pytest.mark.parametrize(
    ("response", "stats"),
    [
        (httpx.Response(404), EngineStats()),
        (httpx.Response(401), None),
        (httpx.Response(200, text="x"), None),
        (status_of(None, state="dead"), None),
    ],
)
async def test_a_server_without_figures_has_none_and_one_that_does_not_tell_them_is_dead(
    response: httpx.Response, stats: EngineStats | None
) -> None:
    engine = remote(Scripted(lambda _: response).client)
    if stats is None:
        with pytest.raises(EngineDiedError):
            await engine.stats()
    else:
        assert await engine.stats() == stats


async def test_figures_that_cannot_even_be_asked_for_are_those_of_a_dead_server(client: httpx.AsyncClient) -> None:
    with pytest.raises(EngineDiedError, match="cannot be asked"):
        await remote(client, url="ftp://prefill.test").stats()


async def test_closed_it_asks_nothing_any_more() -> None:
    server = Scripted(with_ticket)
    engine = remote(server.client)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineClosedError):
        await engine.prefill(request())
    assert server.asked == []


async def test_a_decode_server_fetches_from_a_prefill_server_and_does_without_it_when_it_is_gone(
    serve: Serving, client: httpx.AsyncClient
) -> None:
    prefill = WatchedEngine(role=Role.PREFILL)
    server = await serve(engine=prefill)
    decode = FakeEngine(script, info=fake_info(role=Role.DECODE), leases=prefill.leases)
    far = [
        Worker("prefill-0", remote(client, url="http://127.0.0.1:1", release_through=decode.release), URL, local=False),
        Worker("prefill-1", remote(client, url=server.url, release_through=decode.release), URL, local=False),
    ]
    near = Worker("decode-0", decode, "-")
    routed = Routed(Fleet([*far, near]))
    engine = Disaggregated(routed, routed, BypassRules(), role=Role.DECODE)
    assert await tokens_of(engine.generate(group("one", n=3))) == {i: answer(i) for i in range(3)}
    assert (len(prefill.prefills), decode.pulls) == (1, 1)

    routed = Routed(Fleet([far[0], near]))
    engine = Disaggregated(routed, routed, BypassRules(), role=Role.DECODE)
    assert await tokens_of(engine.generate(group("two", n=1))) == {0: answer(0)}
    assert engine.bypasses["prefill-down"] == 1
    decode.check()
