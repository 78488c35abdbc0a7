"""Answers of third-party servers with wrong types, lengths and encodings: each is at most a fault of its worker."""

import contextlib
import json
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from motet.engine import WorkerState
from motet.engine_info import ModelCard
from motet.engines.upstream.bodies import PieceReader
from motet.engines.upstream.text_source import TextRequest, TextRoute, TextStep
from motet.engines.vllm.report import cards_in, scrape_of, version_in
from motet.engines.vllm.vllm_wire import ScoredAnswer, VLLMReader, kv_params_in
from motet.errors import MotetError, WorkerFaultError
from motet.ids import ModelName
from motet.routing.text_router import TextRouter
from motet.routing.workers.fleet import Fleet
from motet.types import SamplingParams, Usage
from tests.attack.mutants import mutants

pytestmark = pytest.mark.anyio
COUNT = 200

LISTED = {"token_id": 5, "logprob": -1.0, "rank": 1}
CHOICE = {
    "index": 0,
    "token_ids": [5],
    "finish_reason": "stop",
    "stop_reason": 3,
    "logprobs": {"content": [{**LISTED, "top_logprobs": [LISTED, {**LISTED, "rank": 2, "token_id": 6}]}]},
}
TEXT = {
    "index": 0,
    "finish_reason": "stop",
    "delta": {"role": "assistant", "content": "é"},
    "logprobs": {"content": []},
}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def texts(valid: object, *, seed: int) -> Iterator[bytes]:
    """Yields hostile JSON."""
    for body in mutants(valid, seed=seed, count=COUNT):
        try:
            yield json.dumps(msgspec.msgpack.decode(body), default=lambda content: content.decode("latin-1")).encode()
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
            yield body


def test_no_answer_of_a_vllm_server_is_more_than_a_fault() -> None:
    sampling = SamplingParams(max_tokens=9, logprobs=2, stop_token_ids=(3,))
    for text in texts({"choices": [CHOICE], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}, seed=1):
        try:
            pieces = VLLMReader(sampling).feed(b"data: " + text + b"\n\n")
        except MotetError:
            continue
        msgspec.json.encode(pieces)


def read_scored(body: bytes) -> object:
    answer = ScoredAnswer.read(body)
    return VLLMReader(SamplingParams(max_tokens=1)).complete(answer), [*answer.scores((4, 5), k=2)]


@pytest.mark.slow
def test_no_other_message_of_a_vllm_server_is_more_than_a_fault() -> None:
    bodies = {
        "kv_transfer_params": {"remote_block_ids": [1]},
        "data": [{"id": "m", "max_model_len": 9}],
        "version": "1",
    }
    prompt = {"choices": [CHOICE], "usage": USAGE, "prompt_logprobs": [None, {"5": {"logprob": -1.0, "rank": 1}}]}
    metrics = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="9"} 1.0\nprocess_start_time_seconds 1e309\n'
    readers = (kv_params_in, cards_in, version_in, scrape_of, read_scored)
    for number, body in enumerate((*texts(bodies, seed=2), *texts(prompt, seed=3))):
        for read in readers:
            with contextlib.suppress(MotetError):
                read(metrics[: number % len(metrics)] + body if read is scrape_of else body)


def test_no_answer_of_a_text_upstream_is_more_than_a_fault() -> None:
    for text in texts({"choices": [TEXT, {**TEXT, "index": 1}], "usage": USAGE, "other": "x"}, seed=4):
        for read in (PieceReader(0, 2, chat=True).chunk, PieceReader(0, 2, chat=True).body):
            try:
                step = read(text)
            except MotetError:
                continue
            assert b"\n" not in msgspec.json.encode(step)
            msgspec.json.encode(step).decode()
            assert all(isinstance(piece.text, str) for piece in (step.pieces if step else ()))


class FailingStream:
    """A stream of a worker whose answer causes an unexpected error."""

    usage: Usage | None = None
    worker = "a"

    async def read(self) -> Sequence[TextStep]:
        raise OverflowError("int too large")

    def start(self, indices: Sequence[int]) -> None: ...

    def end_choice(self, index: int) -> None: ...

    def fail(self, error: MotetError) -> None: ...

    async def aclose(self) -> None: ...

    def look(self) -> int:
        return 0

    async def evict(self, error: MotetError) -> None: ...

    def generate(self, request: TextRequest) -> "FailingStream":
        return self


async def test_an_unexpected_error_in_reading_an_answer_is_a_fault_of_its_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    routed = TextRouter(fleet)
    fleet.expect("a", "http://a", takes_texts=True)
    routed.put("a", FailingStream().generate)
    fleet.put_text("a", [ModelCard(name=ModelName("m"), max_model_len=9)])
    request = TextRequest(route=TextRoute.CHAT, model="m", body={})
    with pytest.raises(WorkerFaultError, match=r"cannot be processed \(OverflowError\)"):
        await routed.generate(request).read()
    member = fleet.get("a")
    assert member is not None and member.state is WorkerState.DEAD
    assert "int too large" in caplog.text
