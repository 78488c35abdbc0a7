"""Tool calls, through the official client if it can send the request: each of n choices has its own."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionMessageParam

from motet.text.tools.cursor import Cursor
from motet.text.tools.json_formats import HERMES
from motet.text.tools.tool_format import ParsedRegion, Tool
from motet.types import ChoiceStart, GenerateRequest, GrammarKind
from tests.api.calling import PARIS, TIME, WEATHER, CallingServing, called, joined, unstreamed
from tests.api.serving import MODEL, chunks, events, saying
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Weather in Paris?"}]

ANSWERS = {
    "text": "It rains.",
    "nothing": "",
    "a call": PARIS,
    "text and a call": f"Let me see. {PARIS}",
    "two calls": f"{PARIS}\n{called('get_time', '{}')}",
    "thought and a call": f"<think>Where?</think>{PARIS}",
    "unknown tool": called("get_whether", '{"city": "Paris"}'),
    "broken arguments": called("get_weather", '{"city": Paris}'),
    "no object": called("get_weather", "[1]"),
    "no json": "<tool_call>\nweather, please\n</tool_call>",
    "call without its closing tag": PARIS.removesuffix("</tool_call>"),
    "call and a broken one": PARIS + called("get_time", "{]"),
    "tag in the text": "The tag is <tool_call> and that is it.",
    "tag in an argument": called("get_weather", '{"city": "</tool_call>"}'),
    "odd letters": called("get_weather", '{"city": "Zürich \\"日本\\" 😀"}'),
}


async def test_a_call_is_sent_with_its_arguments_and_without_content(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    answer = await served.openai.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    call = only_call(choice.message.tool_calls)
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_loop_of_a_tool_leads_to_an_answer_in_every_choice(
    serve_tools: CallingServing, n: int, stream: bool
) -> None:
    def script(request: GenerateRequest, start: ChoiceStart) -> list[int]:
        answered = "rain" in serve_tools.tokenizer.decode(request.prompt)
        return fake_answer(f"It is rain, says {start.index}." if answered else PARIS)

    served = await serve_tools(script)

    async def post(messages: list[Any]) -> dict[int, dict[str, Any]]:
        body = {"messages": messages, "tools": [WEATHER], "n": n, "stream": stream}
        response = await served.http.post("/v1/chat/completions", json=body)
        return joined(chunks(response)) if stream else unstreamed(response.json())

    first = await post(ASK)
    assert [choice["finish_reason"] for choice in first.values()] == ["tool_calls"] * n
    for choice in first.values():
        message = choice["message"]
        (call,) = message["tool_calls"]
        call["id"] = "call_1"
        again = await post([*ASK, message, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}])
        assert [c["message"]["content"] for c in again.values()] == [f"It is rain, says {i}." for i in range(n)]
        assert {c["finish_reason"] for c in again.values()} == {"stop"}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_a_streamed_answer_joined_is_the_unstreamed_answer(serve_tools: CallingServing, answer: str) -> None:
    served = await serve_tools(saying(answer))
    fields: dict[str, Any] = {"tools": [WEATHER, TIME], "n": 2}
    in_one_piece = unstreamed((await served.chat(**fields)).json())
    assert joined(chunks(await served.chat(**fields, stream=True))) == in_one_piece


@pytest.mark.parametrize("mistake", ["unknown tool", "broken arguments", "no object", "no json", "tag in the text"])
async def test_an_invalid_call_is_content_to_the_letter(serve_tools: CallingServing, mistake: str) -> None:
    served = await serve_tools(saying(ANSWERS[mistake]))
    (choice,) = (await served.chat(tools=[WEATHER])).json()["choices"]
    calls = choice["message"].get("tool_calls", [])
    assert choice["message"]["content"] == ANSWERS[mistake]
    assert choice["finish_reason"] == "stop"
    for call in calls:  # they had started before the mistake, and must not become valid by chance
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["function"]["arguments"])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_choices_with_different_mistakes_do_not_disturb_each_other(
    serve_tools: CallingServing, stream: bool
) -> None:
    answers = list(ANSWERS.values())
    together = await serve_tools(saying(*answers))
    fields: dict[str, Any] = {"tools": [WEATHER, TIME], "stream": stream}

    def choices_of(response: Any) -> dict[int, dict[str, Any]]:
        return joined(chunks(response)) if stream else unstreamed(response.json())

    group = choices_of(await together.chat(**fields, n=len(answers)))
    for index, answer in enumerate(answers):
        alone = await serve_tools(saying(answer))
        assert group[index] == choices_of(await alone.chat(**fields))[0]


async def test_parallel_calls_are_numbered_in_each_choice(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(ANSWERS["two calls"]))
    answer = await served.openai.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER, TIME], n=3)
    ids: set[str] = set()
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        assert [c.function.name for c in map(function_call, calls)] == ["get_weather", "get_time"]
        ids.update(call.id for call in calls)
    assert len(ids) == 6
    received = chunks(await served.chat(tools=[WEATHER, TIME], n=3, stream=True))
    indices = [
        (choice["index"], call["index"])
        for chunk in received
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
        if "id" in call
    ]
    assert sorted(indices) == [(index, number) for index in range(3) for number in range(2)]


async def test_a_call_streams_its_name_first_and_then_its_arguments(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    received = chunks(await served.chat(tools=[WEATHER], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in received]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert set(deltas[1]["tool_calls"][0]) == {"index", "id", "type", "function"}
    assert len([delta for delta in deltas[2:] if "tool_calls" in delta]) > 3
    assert deltas[-1] == {}
    assert received[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_that_is_cut_off_ends_by_length_and_keeps_its_text(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    cut = len(fake_answer(PARIS[: PARIS.index("ris")], eos=False))
    (choice,) = (await served.chat(tools=[WEATHER], max_tokens=cut)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "P')


async def test_without_tools_and_with_tool_choice_none_tags_are_text(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    without: list[dict[str, Any]] = [{}, {"tools": [WEATHER], "tool_choice": "none"}]
    for fields in without:
        (choice,) = (await served.chat(**fields)).json()["choices"]
        assert choice["message"]["content"] == PARIS
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_only_one_call_is_sent_if_parallel_calls_are_off(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(ANSWERS["two calls"]))
    response = await served.chat(tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert len(response.json()["choices"][0]["message"]["tool_calls"]) == 1


NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("choice", "callable_tools"),
    [("required", {"get_weather", "get_time"}), (NAMED, {"get_weather"}), (ALLOWED, {"get_weather"})],
)
async def test_a_required_call_is_a_grammar_of_the_engine(
    serve_tools: CallingServing, choice: object, callable_tools: set[str]
) -> None:
    served = await serve_tools(saying(PARIS))
    await served.chat(tools=[WEATHER, TIME], tool_choice=choice, n=4)
    grammar = served.engine.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert {name for name in ("get_weather", "get_time") if name in grammar.source} == callable_tools
    assert grammar.thinking is not None  # reasoning is allowed before a call


async def test_allowed_tools_can_be_complete_definitions(serve_tools: CallingServing) -> None:
    """They were refused, although OpenAI describes `tools` of `allowed_tools` as definitions."""
    served = await serve_tools(saying(PARIS))
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}}
    for chosen in (choice, ALLOWED):
        await served.chat(tools=[WEATHER, TIME], tool_choice=chosen)
    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": flat[:1]}
    body = {"input": "hi", "tools": flat, "tool_choice": allowed}
    assert (await served.http.post("/v1/responses", json=body)).status_code == 200
    complete, named, of_response = (request.sampling.grammar for request in served.engine.requests)
    assert complete == named == of_response
    assert named is not None


async def test_a_named_function_is_called_once_and_required_calls_can_be_several(serve_tools: CallingServing) -> None:
    """OpenAI promises exactly one call of a forced function. Clients that parse an object accept no second call."""
    served = await serve_tools(saying(f"{PARIS}\n{PARIS}"))
    for choice, number in ((NAMED, 1), ("required", 2)):
        response = await served.chat(tools=[WEATHER, TIME], tool_choice=choice)
        assert len(response.json()["choices"][0]["message"]["tool_calls"]) == number
    await served.chat(tools=[WEATHER, TIME], tool_choice=NAMED, parallel_tool_calls=False)
    named, several, single = (request.sampling.grammar for request in served.engine.requests)
    assert named == single != several


async def test_auto_has_a_grammar_only_if_a_tool_is_strict(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    for tools in ([WEATHER, TIME], [strict, TIME]):
        await served.chat(tools=tools)
    free, bound = (request.sampling.grammar for request in served.engine.requests)
    assert free is None
    assert bound is not None


async def test_the_template_gets_all_tools_even_if_one_is_named(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    for choice in ("auto", NAMED):
        await served.chat(tools=[WEATHER, TIME], tool_choice=choice)
    auto, named = (request.prompt for request in served.engine.requests)
    assert auto == named
    prompt = served.tokenizer.decode(auto)
    assert "get_weather" in prompt
    assert "get_time" in prompt


async def test_the_template_does_not_get_tools_that_cannot_be_called(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying("fine"))
    await served.chat(tools=[WEATHER], tool_choice="none")
    await served.chat()
    silent, plain = (request.prompt for request in served.engine.requests)
    assert silent == plain


@pytest.mark.parametrize("choice", ["auto", "none", "required", NAMED])
async def test_tokenize_of_a_chat_with_tools_is_its_prompt(serve_tools: CallingServing, choice: object) -> None:
    served = await serve_tools(saying(PARIS))
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "what time?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    body = {"messages": turns, "tools": [WEATHER, TIME], "tool_choice": choice, "reasoning_effort": "high"}
    assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
    tokens = (await served.http.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == list(served.engine.requests[0].prompt)
    prompt = served.tokenizer.decode(tokens)
    assert "<think>what time?</think>" in prompt
    assert prompt.count("get_time") == (1 if choice == "none" else 2)


async def test_log_probabilities_and_token_ids_are_sent_once_with_the_parts(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(ANSWERS["thought and a call"]))
    fields: dict[str, Any] = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    (choice,) = (await served.chat(**fields)).json()["choices"]
    ids: list[int] = []
    logprobs: list[object] = []
    for chunk in chunks(await served.chat(**fields, stream=True)):
        (piece,) = chunk["choices"]
        ids += piece.get("token_ids", [])
        logprobs += (piece["logprobs"] or {"content": []})["content"]
    assert ids == choice["token_ids"] == fake_answer(ANSWERS["thought and a call"])
    assert logprobs == choice["logprobs"]["content"]


def failing(cursor: Cursor, tools: Sequence[Tool]) -> ParsedRegion:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("start", ["", "Well. "])
async def test_a_parser_that_fails_names_its_choice(serve_tools: CallingServing, start: str) -> None:
    served = await serve_tools(saying("fine", start + PARIS), tools=replace(HERMES, parse=failing))
    response = await served.chat(tools=[WEATHER], n=2)
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "parser_error"
    assert "choice 1" in error["message"]
    *_, failure, done = events(await served.chat(tools=[WEATHER], n=2, stream=True))
    assert done == "[DONE]"
    assert json.loads(failure)["error"] == error


def only_call(calls: Any) -> ChatCompletionMessageFunctionToolCall:
    (call,) = calls
    return function_call(call)


def function_call(call: object) -> ChatCompletionMessageFunctionToolCall:
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    return call
