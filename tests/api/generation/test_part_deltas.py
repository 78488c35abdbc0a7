"""The chunks of a choice, joined, are its unstreamed answer, whatever its parts are and however they are bundled."""

from collections.abc import Sequence
from functools import cache

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.api.openai.chat_completions import chat_writer
from motet.api.openai.chat_schema import ChatRequest
from motet.text.choice import ChoiceEvent
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.text.tokenizer import Tokenizer
from motet.types import FinishReason, TokenLogprob, Usage
from tests.api.calling import joined, unstreamed
from tests.api.generation.test_chunks import chat, parsed, plan
from tests.tiny_tokenizer import build_tiny_tokenizer

USED = Usage(prompt_tokens=3, completion_tokens=5, reasoning_tokens=2)

TEXTS = st.text(max_size=4)
TEXT_PARTS = st.one_of(TEXTS.map(Content), TEXTS.map(Reasoning))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tiny_tokenizer())


@st.composite
def parts_of_a_choice(draw: st.DrawFn, calls: bool) -> list[Part]:
    parts: list[Part] = list(draw(st.lists(TEXT_PARTS, max_size=4)))
    for number in range(draw(st.integers(0, 3)) if calls else 0):
        parts.append(ToolCallBegin(number, f"call_{number}", draw(st.sampled_from(["f", "get_weather"]))))
        parts += [ToolCallArguments(number, text) for text in draw(st.lists(TEXTS, max_size=3))]
        parts += draw(st.lists(TEXT_PARTS, max_size=1))
    return parts


@st.composite
def events_of_a_choice(draw: st.DrawFn, index: int, calls: bool) -> list[ChoiceEvent]:
    """Puts the parts into events of any size; some have none."""
    rest = draw(parts_of_a_choice(calls))
    events: list[ChoiceEvent] = []
    while bool(rest) or draw(st.booleans()):
        size = draw(st.integers(0, 3))
        events.append(event(index, rest[:size], len(events)))
        rest = rest[size:]
    return [*events, event(index, draw(st.lists(TEXT_PARTS, max_size=2)), len(events), FinishReason.STOP)]


def event(index: int, parts: Sequence[Part], number: int, finish: FinishReason | None = None) -> ChoiceEvent:
    logprob = TokenLogprob(number, -0.5, 1)
    return ChoiceEvent(index, "raw", (number,), (logprob,), (0,), finish, None, tuple(parts))


TOOL = {"type": "function", "function": {"name": "f"}}
CHATS = st.builds(
    lambda logprobs, **more: chat(**logprobs, **more),
    st.sampled_from([{}, {"logprobs": True, "top_logprobs": 1}]),
    return_token_ids=st.booleans(),
    include_reasoning=st.booleans(),
    tools=st.sampled_from([[], [TOOL]]),
)


@pytest.mark.slow
@given(request=CHATS, data=st.data())
def test_chunks_joined_are_the_unstreamed_answer(request: ChatRequest, data: st.DataObject) -> None:
    waiting = [data.draw(events_of_a_choice(index, bool(request.tools))) for index in range(2)]
    steps = []
    while any(waiting):
        choice = data.draw(st.sampled_from([choice for choice in waiting if choice]))
        steps.append(GroupStep((choice.pop(0),)))
    body, chunks = (chat_writer(plan(tokenizer()), request, stream=stream) for stream in (False, True))
    for step in steps:
        body.feed([step], lambda: USED)
    sent = parsed(b"".join(chunks.feed([step], lambda: USED) for step in steps) + b"".join(chunks.close(USED)))
    answer = msgspec.json.decode(b"".join(body.close(USED)))
    assert joined(sent) == unstreamed(answer)
    for choice in answer["choices"]:
        pieces = [chunk["choices"][0] for chunk in sent if chunk["choices"][0]["index"] == choice["index"]]  # type: ignore[index]
        assert [token for piece in pieces for token in piece.get("token_ids", [])] == (choice["token_ids"] or [])
        entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert entries == (choice["logprobs"] or {"content": []})["content"]
