"""`/v1/responses`, over raw HTTP and through the official client. Its `text.format` is the `response_format` of a
chat."""

import pytest
from pydantic import BaseModel

from motet.errors import EngineDiedError, EngineError
from tests.api.responding import final, plain, post, streamed, unstreamed
from tests.api.serving import MODEL, Served, Serving, WatchedEngine, saying
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

LOGPROBS = "message.output_text.logprobs"


async def test_official_client_reads_the_answer(served: Served) -> None:
    response = await served.openai.responses.create(model=MODEL, input="hi")
    assert response.output_text == "hello 0"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.id.startswith("resp_")
    assert response.model == MODEL
    assert response.usage is not None
    assert response.usage.input_tokens == len(served.engine.requests[0].prompt)
    assert response.usage.output_tokens == len(fake_answer("hello 0"))


async def test_answer_is_that_of_the_same_chat(served: Served) -> None:
    chat = await served.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}],
        seed=5,
        temperature=0.5,
    )
    response = await served.openai.responses.create(
        model=MODEL, instructions="be short", input="hi", temperature=0.5, extra_body={"seed": 5}
    )
    assert response.output_text == chat.choices[0].message.content
    of_chat, of_response = served.engine.requests
    assert of_response.prompt == of_chat.prompt
    assert of_response.sampling == of_chat.sampling
    assert of_response.choices == of_chat.choices


async def test_streamed_response_is_the_unstreamed_response(serve: Serving) -> None:
    served = await serve(saying("héllo wörld 日本語"))
    fields = {"include": [LOGPROBS], "top_logprobs": 1, "metadata": {"a": "b"}}
    events = streamed(await post(served, stream=True, **fields))
    assert plain(final(events)) == plain(unstreamed(await post(served, **fields)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "héllo wörld 日本語"
    assert len(deltas) > 3


@pytest.mark.slow
async def test_stream_of_the_official_client_leads_to_the_answer(served: Served) -> None:
    async with served.openai.responses.stream(model=MODEL, input="hi") as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        response = await stream.get_final_response()
    assert "".join(texts) == response.output_text == "hello 0"


async def test_request_is_repeated_in_the_response(served: Served) -> None:
    response = unstreamed(
        await post(
            served,
            instructions="be short",
            max_output_tokens=50,
            metadata={"run": "7"},
            temperature=0.25,
            top_p=0.5,
            parallel_tool_calls=False,
            tool_choice="none",
            tools=[{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}],
            text={"format": {"type": "text"}},
            truncation="disabled",
            store=False,
        )
    )
    assert (response.instructions, response.max_output_tokens, response.metadata) == ("be short", 50, {"run": "7"})
    assert (response.temperature, response.top_p, response.parallel_tool_calls) == (0.25, 0.5, False)
    assert response.tool_choice == "none"
    assert [tool.model_dump(exclude_none=True) for tool in response.tools] == [
        {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
    ]
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "text"


async def test_an_answer_that_reaches_max_output_tokens_is_incomplete(served: Served) -> None:
    response = unstreamed(await post(served, max_output_tokens=1))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "hello"


async def test_a_stop_string_ends_a_response(serve: Serving) -> None:
    served = await serve(saying("one END two"))
    response = unstreamed(await post(served, stop="END"))
    assert (response.output_text, response.status) == ("one ", "completed")


async def test_logprobs_are_those_of_the_text(serve: Serving) -> None:
    served = await serve(saying("hello é"))
    response = unstreamed(await post(served, include=[LOGPROBS], top_logprobs=2))
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == "hello é"
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}


async def test_there_are_no_logprobs_unless_requested(served: Served) -> None:
    (message,) = unstreamed(await post(served)).output
    assert message.type == "message"
    assert message.content[0].model_dump()["logprobs"] == []
    assert served.engine.requests[0].sampling.logprobs is None


async def test_an_answer_can_be_sent_back_unchanged(served: Served) -> None:
    first = await served.openai.responses.create(model=MODEL, input="hi")
    items = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
    response = await post(served, [*items, {"role": "user", "content": "and?"}])
    assert response.status_code == 200, response.text
    prompt = served.tokenizer.decode(served.engine.requests[1].prompt, skip_special_tokens=False)
    assert "<|im_start|>assistant\nhello 0<|im_end|>\n<|im_start|>user\nand?<|im_end|>" in prompt


async def test_ignored_fields_are_accepted(served: Served) -> None:
    response = await post(
        served,
        user="me",
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        max_tool_calls=3,
        store=True,
        prompt_cache_retention="24h",
        background=False,
        include=["reasoning.encrypted_content"],
        previous_response_id=None,
        n=1,
    )
    assert response.status_code == 200, response.text
    assert response.json()["store"] is False


async def test_error_before_the_first_token_keeps_its_status(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={0: EngineDiedError("the engine is gone")}))
    assert_error(await post(served, stream=True), status=503, code="engine_died")


async def test_error_after_the_first_token_is_sent_in_events(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={2: EngineError("the engine broke")}))
    *_, error, failed = streamed(await post(served, stream=True))
    assert error.type == "error"
    assert (error.message, error.code) == ("the engine broke", "engine_error")
    assert failed.type == "response.failed"
    assert failed.response.output_text == "hello "


async def test_all_events_of_a_step_are_one_message(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(saying("a"), gated=True))
    served.engine.steps.release()
    async with served.http.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}) as response:
        pieces = response.aiter_raw()
        first = await anext(pieces)
        assert first.count(b"event: ") == 5  # created, in progress, an item, its part, a delta
        served.engine.steps.release()
        rest = b"".join([piece async for piece in pieces])
    assert rest.count(b"event: ") == 4  # text, part and item done, completed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_group(serve: Serving, stream: bool) -> None:
    served = await serve(engine=WatchedEngine(gated=True))
    request = await served.engine.start_request(post(served, stream=stream))
    served.engine.steps.release()
    await served.abandon(request)


ANSWER = '{"city": "Paris", "degrees": 21}'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
FLAT = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}


class Weather(BaseModel):
    city: str
    degrees: int


async def test_answer_is_parsed_by_the_client(serve: Serving) -> None:
    served = await serve(saying(ANSWER))
    response = await served.openai.responses.parse(model=MODEL, input="hi", text_format=Weather)
    assert response.output_parsed == Weather(city="Paris", degrees=21)
    assert served.engine.requests[0].sampling.grammar is not None


async def test_streamed_answer_is_parsed_by_the_client(serve: Serving) -> None:
    served = await serve(saying(ANSWER))
    async with served.openai.responses.stream(model=MODEL, input="hi", text_format=Weather) as stream:
        response = await stream.get_final_response()
    assert response.output_parsed == Weather(city="Paris", degrees=21)


@pytest.mark.parametrize(
    ("flat", "nested"),
    [
        (FLAT, {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "json_object", "schema": SCHEMA}, {"type": "json_object", "schema": SCHEMA}),
        ({"type": "text"}, {"type": "text"}),
    ],
)
async def test_the_engine_gets_the_same_request_as_for_a_chat(
    serve: Serving, flat: dict[str, object], nested: dict[str, object]
) -> None:
    served = await serve(saying(ANSWER))
    assert (await post(served, text={"format": flat})).status_code == 200
    assert (await served.chat("hi", response_format=nested)).status_code == 200
    of_response, of_chat = served.engine.requests
    assert of_response.sampling == of_chat.sampling
    assert (of_response.sampling.grammar is None) == (flat["type"] == "text")


async def test_format_is_repeated_in_the_response(serve: Serving) -> None:
    served = await serve(saying(ANSWER))
    response = unstreamed(await post(served, text={"format": FLAT}))
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.model_dump(by_alias=True, exclude_none=True) == FLAT
    assert plain(final(streamed(await post(served, text={"format": FLAT}, stream=True)))) == plain(response)


async def test_structured_outputs_are_requested_as_in_a_chat(serve: Serving) -> None:
    served = await serve(saying("yes"))
    fields = {"structured_outputs": {"choice": ["yes", "no"]}}
    unstreamed(await post(served, **fields))
    assert (await served.chat(**fields)).status_code == 200
    of_response, of_chat = served.engine.requests
    assert of_response.sampling == of_chat.sampling
    assert of_response.sampling.grammar is not None


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ({"type": "json_schema", "schema": {}}, "text.format.name"),
        ({"type": "json_schema", "name": "no good", "schema": {}}, "text.format.name"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}, "text.format"),
        ({"type": "json_schema", "name": "x", "schema": []}, "text.format.schema"),
        ({"type": "json_object", "name": "x"}, "text.format.name"),
        ({"type": "json_object", "schema": {"type": "nothing"}}, "text.format.schema"),
        ({"type": "text", "schema": {}}, "text.format.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "text.format.json_schema"),
    ],
)
async def test_a_mistake_in_a_format_is_named(served: Served, form: dict[str, object], param: str) -> None:
    assert_error(await post(served, text={"format": form}), status=400, param=param)
    assert served.engine.requests == []
