"""What a Response repeats of its request."""

import msgspec

from motet.api.responses_shape import Echo
from motet.api.schema_responses import FlatToolChoice, FunctionTool, ResponsesRequest, TextFormat
from motet.errors import RequestError


def echo_json(body: ResponsesRequest) -> bytes:
    """An object. Raises `RequestError`: JSON can write half a surrogate pair, and no answer can repeat it."""
    echo = _echo(body)
    for name in echo.__struct_fields__:
        try:
            msgspec.json.encode(getattr(echo, name))
        except UnicodeEncodeError as error:
            raise RequestError(
                f"Invalid '{name}': it is not valid Unicode: {error.reason}.", param=name, code="invalid_value"
            ) from error
    return msgspec.json.encode(echo)


def _echo(body: ResponsesRequest) -> Echo:
    return Echo(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning={"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        temperature=body.temperature,
        text={"format": _format(body.text.format), "verbosity": body.text.verbosity},
        tool_choice=_choice(body.tool_choice),
        tools=[_tool(tool) for tool in body.tools],
        top_logprobs=body.top_logprobs,
        top_p=body.top_p,
    )


def _format(form: TextFormat | None) -> dict[str, object]:
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _choice(choice: FlatToolChoice | None) -> object:
    if choice is None:
        return "auto"
    if choice.type in ("function", "allowed_tools"):
        return choice.model_dump(exclude_none=True)
    return choice.type


def _tool(tool: FunctionTool) -> dict[str, object]:
    return tool.model_dump()
