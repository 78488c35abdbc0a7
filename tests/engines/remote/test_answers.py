"""What goes wrong with a prefill server, in our words: dead, full, or at odds with us."""

import asyncio

import httpx
import pytest

from motet.errors import DrainingError, EngineDiedError, EngineError, MotetError, OverloadedError
from tests.engines.remote.far import Scripted, refused, remote, request, with_ticket

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (refused(503, "full", "overloaded", **{"retry-after": "7"}), OverloadedError, "answered 503: full"),
        (refused(503, "draining", "draining"), DrainingError, "draining"),
        (refused(503, "its process ended", "engine_died"), EngineDiedError, "its process ended"),
        (refused(503, "closing", "engine_closed"), EngineDiedError, "closing"),
        (refused(500, "sick", "engine_error"), EngineError, "answered 500: sick"),
        (httpx.Response(502, text="Bad Gateway of a proxy"), EngineDiedError, "answered 502: Bad Gateway of a proxy"),
        (httpx.Response(503), EngineDiedError, "answered 503: Service Unavailable"),
        (refused(400, "Unknown parameter: 'x'."), EngineError, "answered 400: Unknown parameter"),
        (refused(429, "too many"), EngineError, "answered 429: too many"),
        (refused(401, "no key"), EngineError, "--prefill-api-key"),
        (refused(403, "not you"), EngineError, "--prefill-api-key"),
        (httpx.Response(400, content=b'{"error": {"message": "\xff"}}'), EngineError, "answered 400"),
        (httpx.Response(200, text="<html>"), EngineError, "no answer to a prefill"),
        (httpx.Response(200, content=b'{"kv_transfer_params": "\xff"}'), EngineError, "no answer to a prefill"),
        (httpx.Response(200, content=b'{"kv_transfer_params": ' + b"[" * 9999), EngineError, "no answer to a prefill"),
        (httpx.Response(200, json={"choices": []}), EngineError, "no ticket; is it running with --role prefill?"),
        (httpx.Response(200, json={"kv_transfer_params": {"version": 99}}), EngineError, "cannot use: .* 99"),
    ],
)
async def test_what_a_refusal_means_here(response: httpx.Response, error: type[MotetError], message: str) -> None:
    engine = remote(Scripted(lambda _: response).client)
    with pytest.raises(MotetError, match=message) as caught:
        await engine.prefill(request())
    assert type(caught.value) is error
    assert engine.down is (error is EngineDiedError)


async def test_overload_says_when_to_come_back() -> None:
    engine = remote(Scripted(lambda _: refused(503, "full", "overloaded", **{"retry-after": "7"})).client)
    with pytest.raises(OverloadedError) as caught:
        await engine.prefill(request())
    assert caught.value.retry_after_s == 7


@pytest.mark.parametrize("fault", [httpx.ConnectError("refused"), httpx.ReadTimeout(""), httpx.ReadError("reset")])
async def test_a_server_that_does_not_answer_has_died(fault: httpx.TransportError) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise fault

    engine = remote(Scripted(fail).client)
    with pytest.raises(EngineDiedError, match=str(fault) or "ReadTimeout"):
        await engine.prefill(request())
    assert engine.down


async def test_nobody_at_the_address_is_a_dead_server(client: httpx.AsyncClient) -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    with pytest.raises(EngineDiedError, match=f"127.0.0.1:{port}"):
        await remote(client, url=f"http://127.0.0.1:{port}").prefill(request())


async def test_a_server_that_answers_again_is_not_down_any_more() -> None:
    server = Scripted(lambda _: httpx.Response(502))
    engine = remote(server.client)
    with pytest.raises(EngineDiedError):
        await engine.prefill(request())
    server.answer = with_ticket
    await engine.prefill(request())
    assert not engine.down


async def test_an_address_that_is_none_is_no_dead_server(client: httpx.AsyncClient) -> None:
    with pytest.raises(EngineError, match="cannot be asked") as caught:
        await remote(client, url="ftp://prefill.test").prefill(request())
    assert type(caught.value) is EngineError
