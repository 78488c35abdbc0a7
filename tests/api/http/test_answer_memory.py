"""The memory of answers that are kept until their end is limited for all clients together, and freed with each one."""

import json
from typing import Any

import pytest

from motet.api.http.admission import ANONYMOUS, AnswerBytes, AnswerMemory
from motet.errors import OverloadedError, RequestError
from motet.testing.fake_engine import FakeGroup
from motet.types import ChoiceDelta, ChoiceStart, GenerateRequest
from tests.api.serving import PROMPT, ROUTES, Served, Serving, WatchedEngine, chunks, every_route
from tests.clock import settle
from tests.error_response import assert_error
from tests.tiny_tokenizer import FIRST_BYTE_ID

pytestmark = pytest.mark.anyio


def long(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    return [FIRST_BYTE_ID + 97 + start.index % 26] * 50


def with_logprobs(path: str, *, n: int, num_top: int = 5, **fields: Any) -> dict[str, Any]:
    """Returns a request whose answer has log-probabilities."""
    if path == "/v1/chat/completions":
        fields |= {"logprobs": True, "top_logprobs": num_top, "n": n}
    elif path == "/v1/completions":
        fields |= {"logprobs": num_top, "n": n}
    else:
        return ROUTES[path] | {
            "stream": fields.pop("stream", False),
            "sampling_params": {"logprobs": num_top, "n": n, **fields},
        }
    return ROUTES[path] | fields


def test_an_answer_above_the_limit_is_an_error_of_its_request() -> None:
    memory = AnswerMemory(100)
    answer = AnswerBytes(memory, "a")
    answer.set(60)
    answer.set(100)
    with pytest.raises(RequestError, match="101 bytes, while this server keeps 100 bytes") as error:
        answer.set(101)
    assert error.value.code == "answer_too_large"
    answer.free()
    answer.free()
    assert memory.num_bytes == 0


def test_one_client_cannot_take_the_memory_of_others() -> None:
    memory = AnswerMemory(100)
    greedy, other, second = (AnswerBytes(memory, client) for client in "aba")
    greedy.set(60)
    second.set(40)
    other.set(50)  # its share, although the memory is taken
    for answer, num_bytes in ((greedy, 61), (other, 51)):
        with pytest.raises(OverloadedError, match="--max-open-answer-bytes"):
            answer.set(num_bytes)
    greedy.free()
    other.set(60)
    second.free()
    other.free()
    assert memory.num_bytes == 0


@every_route
async def test_an_unstreamed_answer_that_grows_too_large_ends_with_400_and_a_stream_does_not(
    serve: Serving, path: str
) -> None:
    served = await serve(long, max_open_answer_bytes=10_000)
    answer = await served.http.post(path, json=with_logprobs(path, n=4, max_tokens=50))
    assert_error(answer, status=400, code="answer_too_large")
    assert served.engine.record.generated_tokens < 200
    assert (await served.http.post(path, json=with_logprobs(path, n=1, max_tokens=5))).status_code == 200
    streamed = await served.http.post(path, json=with_logprobs(path, n=4, max_tokens=50, stream=True))
    assert len(chunks(streamed)) >= 200


class LaggingGroup(FakeGroup):
    """Choice 0 gets no row in the engine until all others have ended."""

    def _advance(self, start: ChoiceStart) -> ChoiceDelta:
        waits = start.index == 0 and len(self.unfinished) > 1
        return ChoiceDelta(0, ()) if waits else super()._advance(start)


class LaggingEngine(WatchedEngine):
    def generate(self, request: GenerateRequest) -> FakeGroup:
        self.requests.append(request)
        group = self.open[request.request_id] = LaggingGroup(self, request)
        return group


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_wait_for_a_slower_choice_of_a_deterministic_group_are_limited(
    serve: Serving, stream: bool
) -> None:
    """The bug: they took any memory: 256 choices of 8,000 tokens with 20 alternatives are 5 GB."""
    served = await serve(engine=LaggingEngine(long), max_open_answer_bytes=10_000)
    body: dict[str, Any] = {"n": 4, "max_tokens": 50, "stream": stream}
    assert (await served.chat(**body, group={"stop_when": {"finished": 4}})).status_code == 200
    answer = await served.chat(**body, group={"stop_when": {"finished": 4}, "deterministic": True})
    assert_error(answer, status=400, code="answer_too_large")
    assert served.service.key_limits.answers.num_bytes == 0
    assert served.engine.record.generated_tokens < 2 * 200


@every_route
async def test_log_probabilities_that_an_answer_has_in_any_case_are_refused_before_the_start(
    serve: Serving, path: str
) -> None:
    served = await serve(long, max_open_answer_bytes=20_000)
    for certain in ({"ignore_eos": True}, {"min_tokens": 50}):
        answer = await served.http.post(path, json=with_logprobs(path, n=4, max_tokens=50, **certain))
        param = "sampling_params.max_tokens" if path == "/inference/v1/generate" else "max_tokens"
        assert_error(answer, status=400, param=param, code="answer_too_large")
    assert served.engine.requests == []


@every_route
async def test_a_long_maximum_alone_refuses_nothing(serve: Serving, path: str) -> None:
    """Few answers have as many tokens as they can have, and without a maximum it is the model's limit."""
    served = await serve(max_open_answer_bytes=100_000)
    for fields in ({}, {"max_tokens": 4000}, {"max_tokens": 4000, "ignore_eos": True, "stop": "hello"}):
        answer = await served.http.post(path, json=with_logprobs(path, n=8, num_top=20, **fields))
        assert answer.status_code == 200, answer.text


async def test_an_evaluation_with_alternatives_fits_by_default(refusing: Served) -> None:
    memory = refusing.service.key_limits.answers
    assert memory.max_bytes > 10 * 64 * 1000 * 21 * 70  # ten of n = 64, 1,000 tokens, 20 alternatives


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20, "max_tokens": 0}])
async def test_prompts_that_each_choice_repeats_count_for_each_choice(refusing: Served, fields: dict[str, Any]) -> None:
    answer = await refusing.complete([5] * 1000, n=100, **fields)
    assert_error(answer, status=400, param="prompt")
    assert "for each of 100 choices, are 2100000" in answer.json()["error"]["message"]


async def test_a_stream_repeats_fewer_log_probabilities_of_prompts(refusing: Served) -> None:
    answer = await refusing.complete([5] * 2000, n=5, echo=True, logprobs=20, stream=True, max_tokens=1)
    assert_error(answer, status=400, param="prompt")
    assert "a streamed request can have at most 200000" in answer.json()["error"]["message"]


async def test_the_memory_of_one_client_is_free_when_it_leaves(serve: Serving) -> None:
    engine = WatchedEngine(long, gated=True)
    served = await serve(engine=engine)
    body = {"prompt": PROMPT, "n": 2, "logprobs": 5, "max_tokens": 50}
    task = await engine.start_request(served.http.post("/v1/completions", json=body))
    engine.go(10)
    while not served.service.key_limits.answers.num_bytes:
        await served.http.get("/health")
    task.cancel()
    await served.until_empty()
    await settle()
    assert served.service.key_limits.answers.num_bytes == 0


async def test_other_clients_get_their_share_while_one_holds_the_memory(serve: Serving) -> None:
    served = await serve(long, api_keys=("one", "two"), max_open_answer_bytes=20_000)
    served.service.key_limits.answers.grow("key-0", 20_000, answer_bytes=20_000)
    statuses = {}
    for key in ("one", "two"):
        answer = await served.http.post(
            "/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 20, "logprobs": 5},
            headers={"authorization": f"Bearer {key}"},
        )
        statuses[key] = answer.status_code
    assert statuses == {"one": 503, "two": 200}
    assert json.loads(answer.text)["choices"][0]["finish_reason"] == "length"
    served.service.key_limits.answers.free("key-0", 20_000)
    assert ANONYMOUS not in served.service.key_limits.clients
