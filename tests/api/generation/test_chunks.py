"""Chunks are made from prepared bytes: they must equal the output of a JSON encoder, in few messages."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from fastapi import FastAPI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from starlette.types import Message

from motet.api.app import create_app
from motet.api.generation.plan import AnswerHead, Plan
from motet.api.openai.chat_completions import chat_writer
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.completions import CompletionRequest, completion_writer
from motet.api.served import one_model
from motet.api.service import Service
from motet.api.vllm.generate import TokensRequest, tokens_writer
from motet.engine import Worker
from motet.ids import RequestId
from motet.settings.server_config import ServerConfig
from motet.testing.fake_engine import FakeEngine, FakeGroup
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep
from motet.text.tokenizer import Tokenizer
from motet.types import FinishReason, GenerateRequest, GroupDelta, SamplingParams, TokenLogprob, Usage, choice_starts
from tests.api.serving import MODEL, ChangeableWorkers, hello, post_to, ready
from tests.api.two_models import served_as
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

ODD_TEXTS = ['"quoted" \\ back', "line\nline\r\n\ttab", "é日本語😀", "\u2028\u2029", "\x00\x1f\x7f", "</script>", ""]
HEAD = {"id": 'chatcmpl-"1"', "created": 123, "model": "a/m\\odel", "system_fingerprint": "fp-same"}
USAGE = Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2)
USAGE_JSON = {
    "prompt_tokens": 3,
    "completion_tokens": 5,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def usage() -> Usage:
    return USAGE


def plan(
    tokenizer: Tokenizer, *, prompts: int = 1, n: int = 2, include: bool = False, continuous: bool = False
) -> Plan:
    return Plan(
        served=served_as(MODEL, FakeEngine(hello), tokenizer),
        head=AnswerHead(id='chatcmpl-"1"', created=123, model="a/m\\odel", fingerprint="fp-same"),
        groups=tuple(
            GenerateRequest(
                request_id=RequestId(str(number)),
                prompt=(5, 6, 7),
                choices=choice_starts(n, 0),
                sampling=SamplingParams(max_tokens=9),
            )
            for number in range(prompts)
        ),
        include_usage=include,
        continuous_usage=continuous,
    )


def chat(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def app_of(engine: FakeEngine, tokenizer: Tokenizer) -> FastAPI:
    workers = ChangeableWorkers([ready(Worker("engine-0", engine, ""))])
    models = one_model(MODEL, engine, tokenizer=tokenizer)
    return create_app(Service(models, ServerConfig(served_model_name=MODEL), workers.reports))


def step(*events: ChoiceEvent, group: int = 0) -> GroupStep:
    return GroupStep(events, group=group)


def parsed(data: bytes) -> list[dict[str, object]]:
    """Returns the JSON of each event, and checks its framing."""
    *parts, rest = data.split(b"\n\n")
    assert rest == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [msgspec.json.decode(part.removeprefix(b"data: ")) for part in parts if part != b"data: [DONE]"]


@pytest.mark.parametrize("text", ODD_TEXTS)
@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
async def test_chat_chunk_equals_the_output_of_an_encoder(
    tokenizer: Tokenizer, text: str, token_ids: bool, finish: FinishReason | None
) -> None:
    writer = chat_writer(plan(tokenizer), chat(return_token_ids=token_ids), stream=True)
    event = ChoiceEvent(1, text, (8, 9), None, None, finish, None)
    _, _, *received = parsed(writer.feed([step(event)], usage))  # after the chunks with the roles
    contents = {} if not text and (token_ids or finish) else {"content": text}
    choices: list[dict[str, object]] = [{"delta": contents, "finish_reason": None}] if text or not finish else []
    if finish:  # the chunk with the reason has no text
        choices.append({"delta": {}, "finish_reason": finish, "stop_reason": None})
    for number, choice in enumerate(choices if token_ids else []):
        choice["token_ids"] = [] if number else [8, 9]
    expected: list[dict[str, object]] = [
        {**HEAD, "object": "chat.completion.chunk", "choices": [{"index": 1, "logprobs": None, **choice}]}
        for choice in choices
    ]
    assert received == expected
    read = [ChatCompletionChunk.model_validate(chunk).model_dump_json(exclude_unset=True) for chunk in received]
    assert [*map(msgspec.json.decode, read)] == expected


@pytest.mark.parametrize(
    ("include", "continuous", "expected"),
    [(False, False, "absent"), (True, False, None), (True, True, USAGE_JSON)],
)
async def test_usage_of_a_chunk_is_as_requested(
    tokenizer: Tokenizer, include: bool, continuous: bool, expected: object
) -> None:
    usage_plan = plan(tokenizer, include=include, continuous=continuous)
    event = ChoiceEvent(0, "x", (8,))
    details = {"completion_tokens_details": {"reasoning_tokens": 0}}
    for writer, more in (
        (chat_writer(usage_plan, chat(), stream=True), details),
        (completion_writer(usage_plan, CompletionRequest.model_validate({"prompt": "x"}), stream=True), {}),
    ):
        expected_usage = USAGE_JSON | more
        for chunk in parsed(writer.feed([step(event)], usage)):
            sent = int("role" not in str(chunk))
            counted = expected_usage | {"completion_tokens": sent, "total_tokens": 3 + sent}
            assert chunk.get("usage", "absent") == (counted if expected == USAGE_JSON else expected)
        ending = b"".join(writer.close(USAGE))
        assert ending.endswith(b"data: [DONE]\n\n")
        assert [(c["choices"], c["usage"]) for c in parsed(ending)] == ([([], expected_usage)] if include else [])


async def test_stop_reason_is_a_string_or_a_token(tokenizer: Tokenizer) -> None:
    writer = chat_writer(plan(tokenizer), chat(), stream=True)
    a_string = ChoiceEvent(0, "x", (8,), None, None, FinishReason.STOP, '"E"')
    a_token = ChoiceEvent(1, "x", (8,), None, None, FinishReason.STOP, 7)
    *_, first, _, second = parsed(writer.feed([step(a_string, a_token)], usage))
    assert choice_of(first)["stop_reason"] == '"E"'
    assert choice_of(second)["stop_reason"] == 7


def choice_of(chunk: dict[str, object]) -> dict[str, object]:
    choices = chunk["choices"]
    assert isinstance(choices, list)
    (choice,) = choices
    assert isinstance(choice, dict)
    return choice


@pytest.mark.parametrize("text", ODD_TEXTS)
async def test_completion_chunk_equals_the_output_of_an_encoder(tokenizer: Tokenizer, text: str) -> None:
    body = CompletionRequest.model_validate({"prompt": ["x", "y"], "logprobs": 1})
    writer = completion_writer(plan(tokenizer, prompts=2), body, stream=True)
    entry = TokenLogprob(8, -0.25, 1, ((8, -0.25), (9, -1.5)))
    event = ChoiceEvent(1, text, (8,), (entry,), (4,), FinishReason.STOP, None)
    (chunk,) = parsed(writer.feed([step(event, group=1)], usage))
    expected: dict[str, object] = {
        **HEAD,
        "object": "text_completion",
        "choices": [
            {
                "index": 3,
                "text": text,
                "logprobs": {
                    "tokens": [tokenizer.token_text(8)],
                    "token_logprobs": [-0.25],
                    "top_logprobs": [{tokenizer.token_text(8): -0.25}],
                    "text_offset": [4],
                },
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }
    assert chunk == expected
    assert msgspec.json.decode(Completion.model_validate(chunk).model_dump_json(exclude_unset=True)) == expected


async def test_token_chunk_equals_the_output_of_an_encoder(tokenizer: Tokenizer) -> None:
    body = TokensRequest.model_validate({"token_ids": [5], "sampling_params": {}, "request_id": 'id "7"'})
    writer = tokens_writer(plan(tokenizer), body, stream=True)
    (chunk,) = parsed(writer.feed([step(ChoiceEvent(1, "x", (8, 9)))], usage))
    choice = {"index": 1, "logprobs": None, "finish_reason": None, "token_ids": [8, 9]}
    assert chunk == {"request_id": 'id "7"', "choices": [choice], "usage": None}


async def sent_by(app: object, path: str, body: object) -> list[Message]:
    """Returns all messages that an app sends for a request."""
    messages: list[Message] = []
    unread = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")

    async def send(message: Message) -> None:
        messages.append(message)

    assert callable(app)
    await app(post_to(path), receive, send)
    return messages


@pytest.mark.parametrize("n", [1, 7, 64])
async def test_all_chunks_of_a_step_go_out_in_one_message(tokenizer: Tokenizer, n: int) -> None:
    app = app_of(FakeEngine(hello), tokenizer)
    body = {"messages": [{"role": "user", "content": "hi"}], "n": n, "stream": True}
    start, *bodies = await sent_by(app, "/v1/chat/completions", body)
    assert start["type"] == "http.response.start"
    steps = max(len(fake_answer(f"hello {i}")) for i in range(n))
    assert len(bodies) == steps + 1  # one for each step, and [DONE]
    assert bodies[1]["body"].count(b"data: ") == n
    assert [message["more_body"] for message in bodies] == [True] * steps + [False]


class LockstepGroup(FakeGroup):
    def __init__(self, engine: "LockstepEngine", request: GenerateRequest) -> None:
        super().__init__(engine, request)
        self._lockstep = engine

    async def __anext__(self) -> GroupDelta:
        await self._lockstep.turn()
        return await super().__anext__()


class LockstepEngine(FakeEngine):
    """All groups take their steps together, as in one forward pass."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(hello)
        self._num_groups = num_groups
        self._turns: list[asyncio.Future[None]] = []

    def generate(self, request: GenerateRequest) -> LockstepGroup:
        return LockstepGroup(self, request)

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._turns.append(mine)
        if len(self._turns) == self._num_groups:
            loop.call_soon(self._step)
        await mine

    def _step(self) -> None:
        turns, self._turns = self._turns, []
        for turn in turns:
            turn.set_result(None)


async def test_one_step_of_several_prompts_goes_out_in_one_message(tokenizer: Tokenizer) -> None:
    body = {"prompt": ["x", "y", "z"], "n": 2, "stream": True}
    _, *bodies, done = await sent_by(app_of(LockstepEngine(3), tokenizer), "/v1/completions", body)
    assert done["body"] == b"data: [DONE]\n\n"
    assert len(bodies) == len(fake_answer("hello 0"))
    for message in bodies:
        assert {choice_of(chunk)["index"] for chunk in parsed(message["body"])} == set(range(6))
    assert_each_finishes_last(bodies)


def assert_each_finishes_last(bodies: Sequence[Message]) -> None:
    finished: set[object] = set()
    for message in bodies:
        for chunk in parsed(message["body"]):
            choice = choice_of(chunk)
            assert choice["index"] not in finished
            if choice["finish_reason"]:
                finished.add(choice["index"])
    assert finished == set(range(6))
