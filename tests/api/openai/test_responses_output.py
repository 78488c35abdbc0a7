"""The items and events of a Response, made from scripted parts of a choice."""

from collections.abc import Sequence

import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseStreamEvent,
)

from motet.api.generation.answer_writer import GroupsWriter
from motet.api.generation.plan import AnswerHead
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.response_output import ResponseOutput
from motet.api.openai.response_writers import response_writer
from motet.api.openai.responses_schema import ResponsesRequest
from motet.errors import EngineDiedError
from motet.text.choice import ChoiceEvent
from motet.text.parts import Content, Part, Reasoning
from motet.text.text_group import GroupStep
from motet.text.tokenizer import Tokenizer
from motet.types import FinishReason, SamplingParams, Usage
from tests.api.generation.test_chunks import chat
from tests.api.one_answer import REASONING_AND_TEXT, TWO_CALLS, steps
from tests.api.responding import checked, final, plain, read_events

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)


def writer(tokenizer: Tokenizer, request: ChatRequest | None = None, *, stream: bool) -> GroupsWriter:
    head = AnswerHead(id="resp_5c0a", created=1, model="tiny", fingerprint="f")
    request = request or chat()
    num_top, shown = request.num_logprobs, request.include_reasoning
    output = ResponseOutput("5c0a", tokenizer, num_top=num_top, reasoning_shown=shown, origins={})
    body = ResponsesRequest.model_validate({"input": "hi", "stream": stream})
    return response_writer(head, body, sampling=SamplingParams(max_tokens=1), output=output)


def both_ways(
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    finish: FinishReason = FinishReason.STOP,
    requested: ChatRequest | None = None,
) -> tuple[Response, list[ResponseStreamEvent]]:
    body = writer(tokenizer, requested, stream=False)
    events = writer(tokenizer, requested, stream=True)
    streamed = b""
    for step in steps(parts, finish):
        assert body.feed([step], lambda: USAGE) == b""
        streamed += events.feed([step], lambda: USAGE)
    return checked(b"".join(body.close(USAGE))), read_events(streamed + b"".join(events.close(USAGE)))


@pytest.mark.parametrize("parts", [[], [Content("hi")], REASONING_AND_TEXT, TWO_CALLS, REASONING_AND_TEXT + TWO_CALLS])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_streamed_response_ends_as_the_unstreamed_response(
    tokenizer: Tokenizer, parts: list[Part], finish: FinishReason
) -> None:
    response, events = both_ways(tokenizer, parts, finish)
    assert plain(final(events)) == plain(response)


@pytest.mark.parametrize("parts", [REASONING_AND_TEXT, TWO_CALLS, REASONING_AND_TEXT + TWO_CALLS])
def test_items_that_were_sent_as_done_are_the_output(tokenizer: Tokenizer, parts: list[Part]) -> None:
    response, events = both_ways(tokenizer, parts)
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == response.output
    assert [event.output_index for event in done] == list(range(len(response.output)))


def test_thoughts_are_an_item_before_the_message(tokenizer: Tokenizer) -> None:
    response, _ = both_ways(tokenizer, REASONING_AND_TEXT)
    thoughts, message = response.output
    assert isinstance(thoughts, ResponseReasoningItem)
    assert thoughts.content is not None
    assert [part.text for part in thoughts.content] == ["let me see"]
    assert thoughts.summary == []
    assert isinstance(message, ResponseOutputMessage)
    assert response.output_text == "It is 42."
    assert {thoughts.status, message.status, response.status} == {"completed"}


def test_reasoning_can_be_omitted(tokenizer: Tokenizer) -> None:
    response, events = both_ways(tokenizer, REASONING_AND_TEXT, requested=chat(include_reasoning=False))
    assert [item.type for item in response.output] == ["message"]
    assert not any("reasoning" in event.type for event in events)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_each_call_is_an_item_with_unchanged_arguments(tokenizer: Tokenizer) -> None:
    response, _ = both_ways(tokenizer, TWO_CALLS, FinishReason.TOOL_CALLS)
    _, *calls = response.output
    functions = [(c.call_id, c.name, c.arguments) for c in calls if isinstance(c, ResponseFunctionToolCall)]
    assert functions == [("call_a", "weather", '{"city": "Paris"}'), ("call_b", "time", "{}")]
    assert response.status == "completed"


def test_events_of_an_answer_have_openais_order(tokenizer: Tokenizer) -> None:
    _, events = both_ways(tokenizer, [Reasoning("hm"), Content("yes"), *TWO_CALLS[1:4]])
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_the_deltas_of_an_item_join_to_its_final_text(tokenizer: Tokenizer) -> None:
    _, events = both_ways(tokenizer, REASONING_AND_TEXT + TWO_CALLS)
    joined: dict[str, str] = {}
    ended: dict[str, str] = {}
    for event in events:
        match event.type:
            case "response.output_text.delta" | "response.reasoning_text.delta":
                joined[event.item_id] = joined.get(event.item_id, "") + event.delta
            case "response.function_call_arguments.delta":
                joined[event.item_id] = joined.get(event.item_id, "") + event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                ended[event.item_id] = event.text
            case "response.function_call_arguments.done":
                ended[event.item_id] = event.arguments
    assert joined == ended
    assert len(joined) == 4  # reasoning, one message, two calls


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (FinishReason.LENGTH, "max_output_tokens"),
        (FinishReason.CONTENT_FILTER, "content_filter"),
        (FinishReason.ABORT, None),
    ],
)
def test_truncated_answer_is_incomplete_and_has_the_reason(
    tokenizer: Tokenizer, finish: FinishReason, reason: str | None
) -> None:
    response, events = both_ways(tokenizer, TWO_CALLS[:3], finish)
    message, call = response.output
    assert response.status == "incomplete"
    assert (response.incomplete_details and response.incomplete_details.reason) == reason
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert (message.status, call.status, call.arguments) == ("completed", "incomplete", '{"city": ')
    assert events[-1].type == "response.incomplete"


def test_usage_has_cached_and_reasoning_tokens(tokenizer: Tokenizer) -> None:
    response, _ = both_ways(tokenizer, REASONING_AND_TEXT)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 5, 12)
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens == 2


def test_text_that_is_not_read_as_parts_is_a_message(tokenizer: Tokenizer) -> None:
    body = writer(tokenizer, stream=False)
    event = ChoiceEvent(0, "as it is", (5,), finish=FinishReason.STOP)
    body.feed([GroupStep((event,))], lambda: USAGE)
    response = checked(b"".join(body.close(USAGE)))
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(message.content[0], ResponseOutputText)
    assert message.content[0].text == "as it is"


def test_a_broken_stream_sends_the_error_and_the_text_so_far(tokenizer: Tokenizer) -> None:
    events = writer(tokenizer, stream=True)
    first = events.feed(steps([Content("half a")], FinishReason.STOP)[:1], lambda: USAGE)
    *_, error, failed = read_events(first + events.fail(EngineDiedError("the engine is gone")))
    assert error.type == "error"
    assert (error.code, error.message) == ("engine_died", "the engine is gone")
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert (failed.response.error.code, failed.response.error.message) == ("server_error", "the engine is gone")
    (message,) = failed.response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"
    assert failed.response.output_text == "half a"


def test_internal_errors_are_sent_without_details(tokenizer: Tokenizer) -> None:
    events = writer(tokenizer, stream=True)
    first = events.feed(steps([Content("x")], FinishReason.STOP)[:1], lambda: USAGE)
    assert b"secret" not in first + events.fail(ValueError("secret"))
