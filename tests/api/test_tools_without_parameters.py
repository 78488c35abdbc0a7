"""A function without parameters is called with an empty object, in each format and on each route."""

import random
from typing import Any

import pytest

from motet.api.openai.chat_schema import ToolField
from motet.text.formats import FORMATS
from motet.text.harmony import HARMONY
from motet.text.tools.tool_format import ToolFormat, ToolMode, ToolRules
from motet.types import Grammar
from tests.api.calling import CallingServing, called
from tests.api.messaging import post as post_message
from tests.api.responding import post as post_response
from tests.api.serving import saying
from tests.text.tools.recordings import read
from tests.text.tools.walks import Walker

WITHOUT: dict[str, dict[str, Any]] = {
    "left out": {},
    "null": {"parameters": None},
    "empty": {"parameters": {}},
    "no properties": {"parameters": {"type": "object", "properties": {}}},
}
PARAMETERS = pytest.mark.parametrize("fields", WITHOUT.values(), ids=WITHOUT)
RING = called("ring_bell", "{}")


@pytest.mark.parametrize("form", [*FORMATS.values(), HARMONY], ids=[*FORMATS, "openai"])
def test_the_arguments_are_an_empty_object_in_each_format(form: ToolFormat) -> None:
    field = ToolField.model_validate({"type": "function", "function": {"name": "ring_bell"}})
    rules = ToolRules(callable=(field.tool(),), mode=ToolMode.REQUIRED, parallel=False)
    special = {tag: 257 + number for number, tag in enumerate(form.opening_tags)} if form is HARMONY else {}
    allowed = Walker(form.grammar(rules, special), list(special))
    texts = [allowed.walk(random.Random(seed), preferred=["{}", '"a": 1', "a"]) for seed in range(4)]
    for text in filter(None, texts):
        if form is HARMONY:
            assert text.endswith("{}")
        else:
            content, calls = read(form, [text], (field.tool(),))
            assert (content, calls) == ("", [("ring_bell", "{}")])
    assert any(texts)


@pytest.mark.anyio
@PARAMETERS
async def test_a_chat_and_a_response_require_an_empty_object(
    serve_tools: CallingServing, fields: dict[str, Any]
) -> None:
    served = await serve_tools(saying(RING))
    function = {"name": "ring_bell", **fields}
    await served.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    await post_response(served, tools=[{"type": "function", **function}], tool_choice="required")
    for request in served.engine.requests:
        assert_empty(request.sampling.grammar)
    assert len(served.engine.requests) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("schema", [{}, {"type": "object", "properties": {}}])
async def test_a_message_requires_an_empty_object(serve_tools: CallingServing, schema: dict[str, Any]) -> None:
    served = await serve_tools(saying(RING))
    tools = [{"name": "ring_bell", "input_schema": schema}]
    await post_message(served, tools=tools, tool_choice={"type": "any"})
    (request,) = served.engine.requests
    assert_empty(request.sampling.grammar)


@pytest.mark.anyio
async def test_a_server_with_open_objects_requires_an_empty_object(serve_tools: CallingServing) -> None:
    """A function without parameters has none, whatever `additionalProperties` means in a schema."""
    served = await serve_tools(saying(RING), additional_properties=True)
    tools = [{"type": "function", "function": {"name": "ring_bell"}}]
    await served.chat(tools=tools, tool_choice="required")
    assert_empty(served.engine.requests[0].sampling.grammar)


def assert_empty(grammar: Grammar | None) -> None:
    assert grammar is not None
    allowed = Walker(grammar.source)
    call = RING.replace("{}", "{arguments}")
    assert allowed.allows(call.replace("{arguments}", "{}"))
    assert not allowed.allows(call.replace("{arguments}", '{"a": 1}'))
