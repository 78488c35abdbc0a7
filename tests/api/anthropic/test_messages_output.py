"""The blocks and events of a message, made from scripted parts of a choice."""

import json
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from anthropic.types import Message, RawMessageStreamEvent

from motet.api.anthropic.message_output import block_id, call_id_of, input_of, message_writer
from motet.api.generation.answer_writer import GroupsWriter
from motet.api.generation.plan import AnswerHead
from motet.errors import EngineDiedError
from motet.text.choice import ChoiceEvent, WorkerReason
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.text.tools.tool_format import call_id
from motet.types import FinishReason, Usage
from tests.api.messaging import checked, final, plain, read_events, texts
from tests.api.one_answer import REASONING_AND_TEXT, TWO_CALLS, steps

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
AT_FIRST = Usage(prompt_tokens=7, completion_tokens=1, cached_tokens=4)


def writer(*, stream: bool, shown: bool = True) -> GroupsWriter:
    head = AnswerHead(id="msg_5c0a", created=1, model="tiny", fingerprint="f")
    return message_writer(head, stream=stream, request_id="req-1", reasoning_shown=shown)


def both_ways(
    parts: Sequence[Part],
    finish: FinishReason = FinishReason.STOP,
    *,
    stop_reason: str | int | None = None,
    shown: bool = True,
) -> tuple[Message, list[RawMessageStreamEvent]]:
    body, events, streamed = writer(stream=False, shown=shown), writer(stream=True, shown=shown), b""
    for step in steps(parts, finish, stop_reason):
        assert body.feed([step], lambda: USAGE) == b""
        streamed += events.feed([step], lambda: AT_FIRST)
    return checked(b"".join(body.close(USAGE))), read_events(streamed + b"".join(events.close(USAGE)))


@pytest.mark.parametrize("parts", [[], [Content("hi")], REASONING_AND_TEXT, TWO_CALLS, REASONING_AND_TEXT + TWO_CALLS])
@pytest.mark.parametrize("finish", list(FinishReason))
def test_streamed_message_ends_as_the_unstreamed_message(parts: list[Part], finish: FinishReason) -> None:
    message, events = both_ways(parts, finish)
    assert plain(final(events)) == plain(message)


def test_a_worker_s_own_reason_is_not_a_stop_sequence() -> None:
    message, _ = both_ways([Content("hi")], stop_reason=WorkerReason.REPETITION)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


@pytest.mark.parametrize("cut", range(len(TWO_CALLS) + 1))
def test_message_that_is_cut_anywhere_is_the_same_both_ways(cut: int) -> None:
    message, events = both_ways(TWO_CALLS[:cut], FinishReason.LENGTH)
    assert plain(final(events)) == plain(message)
    assert message.stop_reason == "max_tokens"


def test_thoughts_are_a_block_before_the_text() -> None:
    message, _ = both_ways(REASONING_AND_TEXT)
    thought, text = message.content
    assert thought.type == "thinking"
    assert thought.thinking == "let me see"
    assert thought.signature
    assert text.type == "text"
    assert text.text == "It is 42."


def test_reasoning_can_be_omitted() -> None:
    message, events = both_ways(REASONING_AND_TEXT, shown=False)
    assert [block.type for block in message.content] == ["text"]
    assert plain(final(events)) == plain(message)
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == 2


def test_each_call_is_a_block_with_its_arguments_as_an_object() -> None:
    message, _ = both_ways(TWO_CALLS, FinishReason.TOOL_CALLS)
    _, *calls = message.content
    content = [(block.id, block.name, block.input) for block in calls if block.type == "tool_use"]
    assert content == [("toolu_a", "weather", {"city": "Paris"}), ("toolu_b", "time", {})]
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("new_id", [call_id, partial(call_id, "", 9)])
def test_the_id_of_a_block_becomes_the_id_of_the_call_again(new_id: Callable[[], str]) -> None:
    """Ids started with `call_`, and clients of Anthropic's API expect `toolu_`. Mistral's ids have 9 characters."""
    id = new_id()
    assert block_id(id).startswith("toolu_")
    assert call_id_of(block_id(id)) == id
    assert [call_id_of(other) for other in ("call_1", "toolu_01", "x")] == ["call_1", "01", "x"]


def test_text_after_a_call_is_a_separate_block() -> None:
    message, _ = both_ways([*TWO_CALLS, Content("So.")])
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use", "text"]


def test_events_of_an_answer_have_anthropics_order() -> None:
    _, events = both_ways([Reasoning("hm"), Content("yes"), *TWO_CALLS[1:4]])
    assert [event.delta.type if event.type == "content_block_delta" else event.type for event in events] == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


@pytest.mark.parametrize(
    ("finish", "stopped_by", "reason", "sequence"),
    [
        (FinishReason.STOP, None, "end_turn", None),
        (FinishReason.STOP, 7, "end_turn", None),
        (FinishReason.STOP, "END", "stop_sequence", "END"),
        (FinishReason.TOOL_CALLS, "END", "tool_use", None),
        (FinishReason.LENGTH, None, "max_tokens", None),
        (FinishReason.CONTENT_FILTER, None, "refusal", None),
        (FinishReason.ABORT, None, "pause_turn", None),
    ],
)
def test_the_end_has_a_reason_of_anthropics(
    finish: FinishReason, stopped_by: str | int | None, reason: str, sequence: str | None
) -> None:
    message, events = both_ways([Content("x")], finish, stop_reason=stopped_by)
    for answer in (message, final(events)):
        assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_usage_has_cached_tokens_apart_and_thoughts_inside() -> None:
    message, events = both_ways(REASONING_AND_TEXT)
    usage, first = message.usage, events[0]
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 4, 0)
    assert usage.output_tokens == 5
    assert first.type == "message_start"
    assert (first.message.usage.input_tokens, first.message.usage.output_tokens) == (3, 1)
    assert (first.message.content, first.message.stop_reason) == ([], None)


def test_text_that_is_not_read_as_parts_is_a_block() -> None:
    body = writer(stream=False)
    body.feed([GroupStep((ChoiceEvent(0, "as it is", (5,), finish=FinishReason.STOP),))], lambda: USAGE)
    assert texts(checked(b"".join(body.close(USAGE)))) == "as it is"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": 1', {"a": 1}),
        ('{"a": "x', {}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1, 2]}}),
        ('{"a": NaN', {"a": None}),
        ("[1", {}),
        ("no JSON", {}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a": 123456789012345678901234567890', {"a": 123456789012345678901234567890}),
    ],
)
def test_input_has_the_arguments_so_far(arguments: str, expected: object) -> None:
    body = writer(stream=False)
    parts: list[Part] = [ToolCallBegin(0, "call_a", "f"), ToolCallArguments(0, arguments)]
    for step in steps(parts, FinishReason.LENGTH):
        body.feed([step], lambda: USAGE)
    (block,) = json.loads(b"".join(body.close(USAGE)))["content"]
    assert block["input"] == expected


def test_a_broken_stream_ends_with_the_error() -> None:
    events = writer(stream=True)
    events.feed(steps([Content("half a")], FinishReason.STOP)[:1], lambda: USAGE)
    name, data = events.fail(EngineDiedError("the engine is gone")).rstrip().split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine is gone"},
        "request_id": "req-1",
    }


def test_internal_errors_are_sent_without_details() -> None:
    assert b"secret" not in writer(stream=True).fail(ValueError("secret"))


def test_complete_arguments_keep_every_digit() -> None:
    assert bytes(input_of('{"a": 1.10000000000000000001}')) == b'{"a": 1.10000000000000000001}'  # type: ignore[call-overload]
