"""`text.format` of `/v1/responses` is the `response_format` of a chat."""

import pytest
from pydantic import BaseModel

from tests.api.responding import ask, final, plain, streamed, whole
from tests.api.serving import MODEL, Served, Serving, saying

pytestmark = pytest.mark.anyio

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
        ({"type": "text"}, {"type": "text"}),
    ],
)
async def test_engine_is_asked_for_what_a_chat_asks_for(
    serve: Serving, flat: dict[str, object], nested: dict[str, object]
) -> None:
    served = await serve(saying(ANSWER))
    whole(await ask(served, text={"format": flat}))
    assert (await served.chat("hi", response_format=nested)).status_code == 200
    of_response, of_chat = served.engine.requests
    assert of_response.sampling == of_chat.sampling
    assert (of_response.sampling.grammar is None) == (flat["type"] == "text")


async def test_format_is_repeated_in_the_response(serve: Serving) -> None:
    served = await serve(saying(ANSWER))
    response = whole(await ask(served, text={"format": FLAT}))
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.model_dump(by_alias=True, exclude_none=True) == FLAT
    assert plain(final(streamed(await ask(served, text={"format": FLAT}, stream=True)))) == plain(response)


async def test_structured_outputs_are_asked_for_as_in_a_chat(serve: Serving) -> None:
    served = await serve(saying("yes"))
    fields = {"structured_outputs": {"choice": ["yes", "no"]}}
    whole(await ask(served, **fields))
    assert (await served.http.post("/v1/chat/completions", json=chat_of(fields))).status_code == 200
    of_response, of_chat = served.engine.requests
    assert of_response.sampling == of_chat.sampling
    assert of_response.sampling.grammar is not None


def chat_of(fields: dict[str, dict[str, list[str]]]) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ({"type": "json_schema", "schema": {}}, "text.format.name"),
        ({"type": "json_schema", "name": "no good", "schema": {}}, "text.format.name"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}, "text.format"),
        ({"type": "json_schema", "name": "x", "schema": []}, "text.format.schema"),
        ({"type": "json_object", "name": "x"}, "text.format.name"),
        ({"type": "text", "schema": {}}, "text.format.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "text.format.json_schema"),
    ],
)
async def test_what_is_wrong_with_a_format_is_named(served: Served, form: dict[str, object], param: str) -> None:
    response = await ask(served, text={"format": form})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert served.engine.requests == []
