"""Reasoning and tool calls in `/v1/responses`: the same parts as in a chat, sent as items."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseInputParam,
    ResponseReasoningItem,
)
from pydantic import BaseModel

from motet.api.openai.response_output import custom_input
from tests.api.calling import PARIS, WEATHER, CallingServing, called
from tests.api.one_answer import ANSWERS, weather_script
from tests.api.responding import final, plain, post, streamed, unstreamed
from tests.api.serving import MODEL, saying
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

FLAT_WEATHER: FunctionToolParam = {"type": "function", **WEATHER["function"], "strict": False}  # type: ignore[typeddict-item]
FLAT_TIME: FunctionToolParam = {"type": "function", "name": "get_time", "parameters": None, "strict": False}

PATCH = '*** Begin Patch\n"é"\n'
PATCH_TOOL = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}
PATCHED = called("apply_patch", json.dumps({"input": PATCH}))


def calls(response: Response) -> list[ResponseFunctionToolCall]:
    return [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_streamed_response_is_the_unstreamed_response(serve_tools: CallingServing, answer: str) -> None:
    served = await serve_tools(saying(answer))
    fields = {"tools": [FLAT_WEATHER, FLAT_TIME], "include": ["message.output_text.logprobs"]}
    response = unstreamed(await post(served, **fields))
    assert plain(final(streamed(await post(served, stream=True, **fields)))) == plain(response)


async def test_items_hold_the_thoughts_the_text_and_the_calls(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(ANSWERS["thought, text and two calls"]))
    response = unstreamed(await post(served, tools=[FLAT_WEATHER, FLAT_TIME]))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls(response)] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ]
    assert len({call.call_id for call in calls(response)}) == 2
    assert response.output_text.strip() == "I look."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len(fake_answer("<think>Where?</think>", eos=False))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_logprobs_of_a_message_have_no_thoughts_tags_or_calls(serve_tools: CallingServing, answer: str) -> None:
    served = await serve_tools(saying(answer))
    fields = {"tools": [FLAT_WEATHER, FLAT_TIME], "include": ["message.output_text.logprobs"]}
    response = unstreamed(await post(served, **fields))
    for item in response.model_dump()["output"]:
        for part in item["content"] if item["type"] == "message" else ():
            text = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
            assert text.strip() == part["text"].strip()  # white space in a token can be dropped


@pytest.mark.parametrize("stream", [False, True])
async def test_loop_of_a_tool_leads_to_an_answer(serve_tools: CallingServing, stream: bool) -> None:
    served = await serve_tools(weather_script(serve_tools))

    async def answer(given: ResponseInputParam) -> Response:
        if not stream:
            return await served.openai.responses.create(model=MODEL, input=given, tools=[FLAT_WEATHER])
        async with served.openai.responses.stream(model=MODEL, input=given, tools=[FLAT_WEATHER]) as events:
            return await events.get_final_response()

    given: ResponseInputParam = [{"role": "user", "content": "Weather in Paris?"}]
    first = await answer(given)
    (call,) = calls(first)
    given += [item.model_dump(mode="json", exclude={"parsed_arguments"}) for item in first.output]  # type: ignore[misc]
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    assert (await answer(given)).output_text == "It is rain."


async def test_prompt_of_a_loop_is_that_of_the_same_chat(serve_tools: CallingServing) -> None:
    served = await serve_tools(weather_script(serve_tools))
    user, output = {"role": "user", "content": "Weather in Paris?"}, "rain"
    first = unstreamed(await post(served, [user], tools=[FLAT_WEATHER]))
    (call,) = calls(first)
    items = [user, *first.model_dump()["output"]]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    await post(served, items, tools=[FLAT_WEATHER])
    function = {"name": call.name, "arguments": call.arguments}
    turns = {
        "messages": [
            user,
            {
                "role": "assistant",
                "reasoning_content": "Where?",
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": output},
        ]
    }
    response = await served.http.post("/v1/chat/completions", json={**turns, "tools": [WEATHER]})
    assert response.status_code == 200, response.text
    _, of_response, of_chat = served.engine.requests
    assert of_response.prompt == of_chat.prompt


async def test_a_required_tool_constrains_the_answer_as_in_a_chat(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    response = unstreamed(
        await post(served, tools=[FLAT_WEATHER], tool_choice={"type": "function", "name": "get_weather"})
    )
    assert response.model_dump()["tool_choice"] == {"type": "function", "name": "get_weather"}
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    await served.chat("hi", tools=[WEATHER], tool_choice=chosen)
    of_response, of_chat = served.engine.requests
    assert of_response.sampling == of_chat.sampling
    assert of_response.sampling.grammar is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_of_a_namespace_is_called_and_goes_back_under_its_own_name(
    serve_tools: CallingServing, stream: bool
) -> None:
    """Codex sends the tools of an MCP server in this form; the other fields are from its requests."""
    served = await serve_tools(saying(called("mcp__map__get_weather", '{"city": "Paris"}')))
    tools = [
        {"type": "web_search", "external_web_access": True},
        PATCH_TOOL,
        {"type": "namespace", "name": "mcp__map", "description": "Maps.", "tools": [FLAT_WEATHER, FLAT_TIME]},
        FLAT_TIME,
    ]
    codex = {"tools": tools, "tool_choice": "auto", "store": False, "client_metadata": {"x-installation-id": "1"}}
    user = {"role": "user", "content": "hi"}
    answer = await post(served, [user], stream=stream, **codex)
    response = final(streamed(answer)) if stream else unstreamed(answer)
    (call,) = calls(response)
    assert (call.namespace, call.name) == ("mcp__map", "get_weather")
    assert [tool.type for tool in response.tools] == ["custom", "namespace", "function"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    unstreamed(await post(served, [user, *response.model_dump(mode="json")["output"], output], **codex))
    prompts = [serve_tools.tokenizer.decode(request.prompt) for request in served.engine.requests]
    assert all("mcp__map__get_time" in prompt and "apply_patch" in prompt for prompt in prompts)
    assert "web_search" not in prompts[0]
    assert prompts[1].count("mcp__map__get_weather") == prompts[0].count("mcp__map__get_weather") + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_is_called_with_text_and_its_result_goes_back(
    serve_tools: CallingServing, stream: bool
) -> None:
    """The tool was accepted and not shown to the model, and its calls of earlier turns were refused."""
    served = await serve_tools(saying(PATCHED))
    user, fields = {"role": "user", "content": "hi"}, {"tools": [PATCH_TOOL]}
    answer = await post(served, [user], stream=stream, **fields)
    response = final(streamed(answer)) if stream else unstreamed(answer)
    (call,) = response.output
    assert isinstance(call, ResponseCustomToolCall)
    assert (call.name, call.input) == ("apply_patch", PATCH)
    (tool,) = response.model_dump(mode="json", exclude_none=True)["tools"]
    assert tool == PATCH_TOOL
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    unstreamed(await post(served, [user, *response.model_dump(mode="json")["output"], output], **fields))
    first, second = (serve_tools.tokenizer.decode(request.prompt) for request in served.engine.requests)
    assert "Changes files." in first
    assert "start: LINE+" in first
    assert second.count("apply_patch") == first.count("apply_patch") + 1
    assert "done" in second


async def test_the_input_of_a_custom_tool_is_one_delta(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PATCHED))
    events = streamed(await post(served, stream=True, tools=[PATCH_TOOL]))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    inputs = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert (deltas, inputs) == ([PATCH], [PATCH])


async def test_a_custom_tool_can_be_chosen(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PATCHED))
    chosen = {"type": "custom", "name": "apply_patch"}
    for choice in (chosen, {"type": "allowed_tools", "mode": "required", "tools": [chosen]}):
        await post(served, tools=[PATCH_TOOL, FLAT_TIME], tool_choice=choice)
        grammar = served.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert "get_time" not in grammar.source


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a\\nb', "a\nb"),
        ('{"inp', ""),
        ("", ""),
        ('{"patch": "x"}', "x"),
        ('{"input": "x", "y": 1}', '{"input": "x", "y": 1}'),
        ('{"input": 5}', '{"input": 5}'),
        ("no JSON", "no JSON"),
    ],
)
def test_the_input_is_the_only_argument_as_far_as_it_was_generated(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


async def test_a_function_of_a_namespace_can_be_chosen(
    serve_tools: CallingServing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "motet.api")
    served = await serve_tools(saying(called("map__get_weather", '{"city": "Paris"}')))
    tools = [{"type": "namespace", "name": "map", "tools": [FLAT_WEATHER]}, {"type": "web_search"}]
    choice = {"type": "function", "namespace": "map", "name": "get_weather"}
    response = await post(served, tools=tools, tool_choice=choice)
    assert response.status_code == 200, response.text
    assert served.engine.requests[0].sampling.grammar is not None
    (record,) = [record for record in caplog.records if record.msg == "built-in tools are left out"]
    assert vars(record)["fields"]["types"] == ["web_search"]


async def test_arguments_of_a_pydantic_tool_are_parsed_by_the_client(serve_tools: CallingServing) -> None:
    class Weather(BaseModel):
        city: str

    tool: Any = openai.pydantic_function_tool(Weather, name="get_weather")
    served = await serve_tools(saying(PARIS))
    flat = {"type": "function", **tool["function"]}
    response = await served.openai.responses.parse(model=MODEL, input="hi", tools=[flat])  # type: ignore[list-item]
    (call,) = calls(response)
    assert call.model_dump()["parsed_arguments"] == {"city": "Paris"}


async def test_a_truncated_call_is_sent_with_the_arguments_so_far(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    most = len(fake_answer(PARIS.partition('"Paris')[0], eos=False))
    response = unstreamed(await post(served, tools=[FLAT_WEATHER], max_output_tokens=most))
    (call,) = calls(response)
    assert (response.status, call.status) == ("incomplete", "incomplete")
    assert '{"city": "Paris"}'.startswith(call.arguments)


async def test_reasoning_can_be_omitted_or_left_in_the_text(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying("<think>hm</think>So."))
    assert [item.type for item in unstreamed(await post(served)).output] == ["reasoning", "message"]
    without = unstreamed(await post(served, include_reasoning=False))
    assert ([item.type for item in without.output], without.output_text) == (["message"], "So.")
    together = unstreamed(await post(served, separate_reasoning=False))
    assert ([item.type for item in together.output], together.output_text) == (["message"], "<think>hm</think>So.")


async def test_thoughts_that_are_cut_leave_no_message(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying("<think>and so on, and so on"))
    response = unstreamed(await post(served, max_output_tokens=12))
    (thoughts,) = response.output
    assert isinstance(thoughts, ResponseReasoningItem)
    assert (thoughts.status, response.output_text) == ("incomplete", "")
