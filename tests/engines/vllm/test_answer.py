"""Streams and prefills of a vLLM server over a real socket, and what happens to them when it fails."""

from dataclasses import replace

import msgspec
import pytest

from motet.engines.http import server_client
from motet.engines.vllm.requests import Dialect, VLLMRequest
from motet.engines.vllm.vllm_server import VLLMAnswer, VLLMServer
from motet.engines.vllm.vllm_wire import VLLMPiece, VLLMUsage
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OverloadedError, RequestError
from motet.types import Finish, FinishReason, PromptScores, SamplingParams, TokenLogprob
from tests.engines.vllm.scripted_vllm import canned, vllm_server_at
from tests.engines.vllm.test_report import TEXT
from tests.engines.vllm.test_server import OK
from tests.peers.fake_vllm import FakeVLLM
from tests.peers.vllm_switches import Switches

pytestmark = pytest.mark.anyio

PROMPT = tuple(range(5, 45))
ASK = VLLMRequest(
    request_id="r-1",
    model="smollm2",
    prompt=PROMPT,
    n=3,
    seed=7,
    sampling=SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2),
)


async def read_all(answer: VLLMAnswer) -> list[VLLMPiece | VLLMUsage]:
    items: list[VLLMPiece | VLLMUsage] = []
    try:
        while read := await answer.read():
            items += read
        assert await answer.read() == []
    finally:
        answer.close()
    return items


def choices(items: list[VLLMPiece | VLLMUsage]) -> dict[int, list[TokenLogprob]]:
    """Returns the tokens of each child, and checks that the items end with usage."""
    *pieces, usage = items
    assert usage == VLLMUsage()
    tokens: dict[int, list[TokenLogprob]] = {}
    for piece in pieces:
        assert isinstance(piece, VLLMPiece)
        assert piece.logprobs is not None
        tokens.setdefault(piece.index, []).extend(piece.logprobs)
        assert [entry.token_id for entry in piece.logprobs] == list(piece.token_ids)
    return tokens


async def test_both_routes_give_the_same_answer() -> None:
    answers = []
    for scale_out in (False, True):
        async with FakeVLLM(switches=Switches(scale_out=scale_out)) as fake, vllm_server_at(fake.url) as server:
            await server.report()
            assert server.dialect is (Dialect.GENERATE if scale_out else Dialect.COMPLETIONS)
            answers.append(choices(await read_all(await server.open(ASK))))
            fake.check()
    assert answers[0] == answers[1]
    assert {index: len(tokens) for index, tokens in answers[0].items()} == {0: 6, 1: 6, 2: 6}


async def test_a_server_that_is_killed_in_mid_answer_has_died() -> None:
    async with FakeVLLM(stepped=True) as fake, vllm_server_at(fake.url) as server:
        answer = await server.open(ASK)
        fake.step()
        assert await answer.read()
        await fake.kill()
        with pytest.raises(EngineDiedError, match="was lost in the middle of its answer"):
            await read_all(answer)
        with pytest.raises(EngineDiedError, match="did not answer"):
            await server.open(ASK)


async def test_an_answer_that_ends_without_done_has_broken_off() -> None:
    async with (
        canned({"/v1/completions": (200, b'data: {"choices":[]}\n\n')}) as far,
        vllm_server_at(far.url) as server,
    ):
        with pytest.raises(EngineDiedError, match="broke off in the middle of its answer"):
            await read_all(await server.open(ASK))


@pytest.mark.parametrize(("healthy", "kind"), [(True, EngineError), (False, EngineDiedError)])
async def test_the_servers_health_tells_a_failed_request_from_a_dead_engine(
    healthy: bool, kind: type[MotetError]
) -> None:
    """vLLM sends the same error for both, as a response and in mid-stream."""
    error = b'{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}'
    stream = b"data: " + error + b"\n\ndata: [DONE]\n\n"
    async with canned({"/health": (200 if healthy else 503, b"")}) as far, vllm_server_at(far.url) as server:
        far.answers["/v1/completions"] = (200, stream)
        answer = await server.open(ASK)
        with pytest.raises(EngineError, match="EngineCore encountered") as in_stream:
            await answer.read()
        answer.close()
        far.answers["/v1/completions"] = (500, error)
        with pytest.raises(EngineError, match="EngineCore encountered") as as_response:
            await server.open(ASK)
        with pytest.raises(EngineError) as of_prefill:
            await server.prefill(ASK)
    assert {type(caught.value) for caught in (in_stream, as_response, of_prefill)} == {kind}


async def test_an_engine_has_died_even_if_its_server_is_back_before_its_health_is_checked() -> None:
    """The bug: its groups ended as failed requests, since the new engine is healthy."""
    error = b'{"error":{"message":"Internal server error","type":"InternalServerError","code":500}}'
    stream = b"data: " + error + b"\n\ndata: [DONE]\n\n"
    async with canned(dict(OK)) as far, vllm_server_at(far.url) as server:
        await server.report()
        far.answers[Dialect.GENERATE] = (200, stream)
        answer = await server.open(ASK)
        far.answers[Dialect.GENERATE] = (500, error)
        with pytest.raises(EngineError) as before:
            await server.open(ASK)
        assert type(before.value) is EngineError  # nothing was started again
        far.answers["/metrics"] = (
            200,
            TEXT.replace(b"process_start_time_seconds 1.", b"process_start_time_seconds 2."),
        )
        with pytest.raises(EngineDiedError, match="Internal server error"):
            await server.open(ASK)
        with pytest.raises(EngineDiedError, match="Internal server error"):
            await server.prefill(ASK)
        with pytest.raises(EngineDiedError, match="Internal server error"):
            await answer.read()
        answer.close()


async def test_a_server_that_failed_and_does_not_report_its_health_is_silent() -> None:
    """The groups of a silent server can continue on another worker."""
    async with FakeVLLM() as fake, server_client() as client:
        server = VLLMServer(fake.url, client, verdict_timeout_s=0.05)
        fake.stop()
        with pytest.raises(EngineSilentError, match=r"^it broke$"):
            await server.diagnose(EngineError("it broke"), start=None)
        fake.resume()


async def test_a_refusal_has_the_servers_message() -> None:
    async with FakeVLLM() as fake, vllm_server_at(fake.url) as server:
        with pytest.raises(OverloadedError, match="no longer has the model: The model `other` does not exist"):
            await server.open(replace(ASK, model="other"))
        with pytest.raises(RequestError, match="greater than max allowed: 20") as caught:
            await server.open(replace(ASK, sampling=SamplingParams(max_tokens=1, logprobs=21)))
        assert caught.value.param == "logprobs"
        fake.switches.too_busy = 1
        with pytest.raises(OverloadedError, match="503: The server is overloaded"):
            await server.open(ASK)
        fake.check()


async def test_a_ticket_in_a_list_is_read() -> None:
    async with FakeVLLM(switches=Switches(ticket_in_list=True)) as fake, vllm_server_at(fake.url) as server:
        (params,) = await server.prefill(ASK)
        assert fake.network.pinned == [params["remote_request_id"]]


async def test_a_prefill_without_a_ticket_is_an_error() -> None:
    async with FakeVLLM(switches=Switches(connector=False)) as fake, vllm_server_at(fake.url) as server:
        with pytest.raises(EngineError, match=rf"{fake.url} computed the prompt, but made no ticket"):
            await server.prefill(ASK)


@pytest.mark.parametrize("answer", [(200, b"{}"), (404, b""), (500, b""), (503, b"")])
async def test_releasing_a_ticket_returns_false_if_it_fails_and_never_raises(answer: tuple[int, bytes]) -> None:
    async with canned({"/v1/completions": answer}) as far, vllm_server_at(far.url) as server:
        assert not await server.reject({"remote_port": 1}, "m", trace="trace")
    (_, headers, body) = far.requests[0]
    assert headers["x-request-id"].startswith("trace-release-")
    sent = msgspec.json.decode(body, type=dict[str, object])
    assert (sent["prompt"], sent["max_tokens"], sent["kv_transfer_params"]) == ([1], 10**9, {"remote_port": 1})


async def test_the_log_probabilities_of_a_prompt_are_read_with_the_choice() -> None:
    scores = b'[null,{"6":{"logprob":-3.0,"rank":2},"2":{"logprob":-0.1,"rank":1}}]'
    body = b'{"choices":[{"index":0,"token_ids":[9],"finish_reason":"length","prompt_logprobs":' + scores + b"}]}"
    async with canned({"/v1/completions": (200, body)}) as far, vllm_server_at(far.url) as server:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
        parts, items = await server.scored(replace(ASK, prompt=(5, 6), sampling=sampling, stream=False))
        assert [*PromptScores(parts)] == [None, TokenLogprob(6, -3.0, 2, ((2, -0.1),))]
        assert items == [VLLMUsage(), VLLMPiece(0, (9,), None, Finish(FinishReason.LENGTH))]
    sent = msgspec.json.decode(far.requests[0][2], type=dict[str, object])
    assert (sent["prompt_logprobs"], sent["max_tokens"], sent["stream"]) == (1, 1, False)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(
    ("trace", "session", "request_id", "session_id"),
    [("client-1", "s-1", "client-1-r-1", "s-1"), ("", "", "r-1", None), ("line\nbreak", "sn\u00f6w", "r-1", None)],
)
async def test_the_id_of_a_request_has_the_clients_name_if_a_header_can_hold_it(
    trace: str, session: str, request_id: str, session_id: str | None, prefill: bool
) -> None:
    async with canned(OK) as far, vllm_server_at(far.url) as server:
        with pytest.raises(MotetError):
            await (server.prefill if prefill else server.open)(replace(ASK, trace=trace, session_id=session))
    (_, headers, _) = far.requests[0]
    assert (headers.get("x-request-id"), headers.get("x-session-id")) == (request_id, session_id)
