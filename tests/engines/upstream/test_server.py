"""Requests to a text upstream and its reports: keys, time-outs, certificates and all kinds of refusals."""

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from motet.engine_info import EngineKind
from motet.engines.http import server_client
from motet.engines.upstream.text_source import UNKNOWN_LENGTH
from motet.engines.upstream.upstream_server import UpstreamOptions, UpstreamServer
from motet.errors import (
    EngineDiedError,
    EngineError,
    EngineSilentError,
    MotetError,
    OtherServerError,
    OverloadedError,
    UpstreamRefusalError,
)
from tests.engines.upstream.fake_upstream import fake_upstream, read_all, request_for
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.openai_script import CHAT, Behaviour, FixedAnswer

pytestmark = pytest.mark.anyio

HTML = FixedAnswer(502, b"<html><h1>Bad gateway</h1></html>", (("content-type", "text/html"),))

REFUSALS: dict[str, tuple[FixedAnswer, type[MotetError], int, str]] = {
    "400": (FixedAnswer.error(400, "bad", param="x", code="c"), UpstreamRefusalError, 400, "bad"),
    "422 of FastAPI": (FixedAnswer(422, b'{"detail":[{"loc":["body"]}]}'), UpstreamRefusalError, 422, "loc"),
    "404 of an old vLLM": (
        FixedAnswer(404, b'{"object":"error","message":"no such model","type":"NotFoundError","code":404}'),
        UpstreamRefusalError,
        404,
        "no such model",
    ),
    "429": (FixedAnswer.error(429, "slow down"), UpstreamRefusalError, 429, "slow down"),
    "error as a text": (
        FixedAnswer(400, b'{"error":"model not loaded"}'),
        UpstreamRefusalError,
        400,
        "model not loaded",
    ),
    "500": (FixedAnswer.error(500, "broken"), EngineError, 500, "broken"),
    "502": (HTML, EngineDiedError, 503, "502: Status"),
    "503": (FixedAnswer(503, b"busy"), OverloadedError, 503, "busy"),
    "503 for ages": (FixedAnswer(503, b"busy", (("retry-after", "9" * 5000),)), OverloadedError, 503, "busy"),
    "504": (FixedAnswer(504), EngineDiedError, 503, "504"),
    "redirect": (FixedAnswer(307, b"", (("location", "http://elsewhere/"),)), EngineError, 500, "redirects"),
}


@pytest.mark.parametrize("name", list(REFUSALS))
async def test_each_refusal_becomes_one_of_motets_errors(name: str) -> None:
    refused, kind, status, message = REFUSALS[name]
    async with fake_upstream() as fake:
        fake.peer.behaviour.next_errors.append(refused)
        with pytest.raises(kind) as caught:
            await fake.answer(request_for())
    assert caught.value.status == status
    assert message in caught.value.message
    assert "<" not in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
async def test_an_html_page_as_an_answer_is_an_error(stream: bool) -> None:
    async with fake_upstream() as fake:
        fake.peer.behaviour.next_errors.append(FixedAnswer(200, b"<html></html>", (("content-type", "text/html"),)))
        with pytest.raises(EngineError, match="Choice 0"):
            await fake.answer(request_for(stream=stream))


async def test_the_configured_key_is_sent_and_never_the_clients() -> None:
    async with fake_upstream(Behaviour(key="theirs"), options=UpstreamOptions(api_key="theirs", pass_key=True)) as fake:
        request = request_for()
        await fake.upstream.server.post(CHAT, _encoded(), headers={"authorization": "Bearer ours"})
        await fake.answer(request)
        assert {request.headers["authorization"] for request in fake.peer.requests} == {"Bearer theirs"}


async def test_the_clients_key_is_passed_on_only_if_that_is_allowed() -> None:
    for allowed in (True, False):
        async with fake_upstream(options=UpstreamOptions(pass_key=allowed)) as fake:
            reply = await fake.upstream.server.post(CHAT, _encoded(), headers={"authorization": "Bearer client"})
            reply.close()
            assert fake.peer.requests[-1].headers.get("authorization") == ("Bearer client" if allowed else None)


async def test_a_refused_key_of_the_gateway_is_a_server_error() -> None:
    async with fake_upstream(options=UpstreamOptions(api_key="old")) as fake:
        fake.peer.behaviour.key = "new"
        with pytest.raises(EngineError, match="the key of this gateway") as caught:
            await fake.answer(request_for())
    assert caught.value.status == 500


async def test_a_refused_key_of_the_client_is_the_clients_error() -> None:
    async with fake_upstream(options=UpstreamOptions(pass_key=True)) as fake:
        fake.peer.behaviour.key = "another"
        with pytest.raises(UpstreamRefusalError) as caught:
            await fake.answer(request_for())
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_is_silent_before_the_first_byte_ends_the_group(stream: bool) -> None:
    options = UpstreamOptions(timeout_s=0.05)
    async with fake_upstream(options=options, learn=False) as fake:
        fake.peer.close_gate()
        with pytest.raises(EngineSilentError, match=r"sent no data for 0\.05 s"):
            await fake.answer(request_for(stream=stream))


async def test_a_stream_that_falls_silent_ends_the_group() -> None:
    async with fake_upstream(learn=False) as fake:
        gate = fake.peer.close_gate()
        gate.release()
        group = fake.upstream.generate(request_for())
        await group.read()
        fake.upstream.server.options = UpstreamOptions(timeout_s=0.05)
        gate.release()  # the next piece must arrive within the new time limit
        with pytest.raises(EngineSilentError, match="No other server can continue"):
            await read_all(group)


async def test_a_server_that_cannot_be_reached_is_dead() -> None:
    async with FakeOpenAI() as peer:
        url = peer.url
    async with server_client() as client:
        with pytest.raises(EngineDiedError, match="did not answer"):
            await UpstreamServer(url, client).report()


async def test_the_error_for_an_invalid_url_says_what_is_expected() -> None:
    expected = r"upstream htp://x is not valid: 'htp://x'\. Expected http://HOST:PORT"
    async with server_client() as client:
        with pytest.raises(EngineError, match=expected):
            await UpstreamServer("htp://x", client).report()


async def test_a_certificate_is_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    certificate, tls = await asyncio.to_thread(_self_signed, tmp_path)
    async with FakeOpenAI(tls=tls) as peer:
        async with server_client() as client:
            with pytest.raises(EngineDiedError, match="certificate"):
                await UpstreamServer(peer.url, client).report()
        async with server_client(tls=ssl.create_default_context(cafile=certificate)) as client:
            assert (await UpstreamServer(peer.url, client).report()).info.model == "m"


async def test_a_report_has_models_with_their_lengths_and_parents() -> None:
    cards = ({"id": "adapter", "parent": "base"}, {"id": "base", "max_model_len": 99, "root": "org/base"})
    async with fake_upstream(Behaviour(models=cards), learn=False) as fake:
        report = await fake.upstream.server.report()
    assert (report.info.model, report.info.max_model_len, report.info.kind) == ("base", 99, EngineKind.OPENAI)
    assert [(card.name, card.parent, card.max_model_len) for card in report.models] == [
        ("base", None, 99),
        ("adapter", "base", UNKNOWN_LENGTH),
    ]
    assert [(card.name, card.root) for card in report.models] == [("base", "org/base"), ("adapter", "adapter")]


@pytest.mark.parametrize("refused", [FixedAnswer(404), FixedAnswer(200, b"hello"), FixedAnswer(200, b"[]")])
async def test_a_server_without_a_list_of_models_is_another_kind_of_server(refused: FixedAnswer) -> None:
    async with fake_upstream(learn=False) as fake:
        fake.peer.behaviour.listing = refused
        with pytest.raises(OtherServerError):
            await fake.upstream.server.report()


def _encoded() -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'


def _self_signed(folder: Path) -> tuple[Path, ssl.SSLContext]:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=127.0.0.1 "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
