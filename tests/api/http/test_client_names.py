"""Errors of an engine name the fields of the client's request, also where that request became one for a chat."""

import json

import pytest

from motet.api.http.failure import renamed
from motet.api.openai.converted_chat import MESSAGE_NAMES, RESPONSE_NAMES
from motet.errors import RequestError, UpstreamRefusalError
from tests.api import messaging
from tests.api.calling import CallingServing
from tests.api.openai.test_responses_tools import FLAT_TIME, FLAT_WEATHER
from tests.api.responding import post, streamed
from tests.api.serving import Served, events, saying
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


def of_second_tool() -> RequestError:
    param = "tools[1].function.parameters"
    return RequestError(f"Invalid '{param}': too deep, see 'stop'.", param=param, code="deep", others=("stop",))


async def test_an_engine_s_error_names_the_tool_of_a_namespace_where_it_is(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying("a few words"))
    tools = [FLAT_TIME, {"type": "namespace", "name": "map", "tools": [FLAT_WEATHER]}]
    served.engine.scenario.fail_after = {2: of_second_tool()}
    *_, error, _ = streamed(await post(served, stream=True, tools=tools))
    assert error.type == "error"
    assert (error.param, error.code) == ("tools[1].tools[0].parameters", "deep")
    assert error.message.startswith("Invalid 'tools[1].tools[0].parameters': too deep")
    assert_error(await post(served, tools=tools), status=400, param="tools[1].tools[0].parameters")


async def test_one_error_for_two_clients_has_the_names_of_each(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying("a few words"))
    served.engine.scenario.fail_after = {0: of_second_tool()}
    assert_error(await post(served), status=400, param="tools[1].parameters")
    message = (await messaging.post(served)).json()["error"]["message"]
    assert message == "Invalid 'tools[1].input_schema': too deep, see 'stop_sequences'."


async def test_an_engine_s_error_has_sglang_s_names_on_its_route(served: Served) -> None:
    param = "sampling_params.min_tokens"
    served.engine.scenario.fail_after = {1: RequestError(f"Invalid '{param}': too many.", param=param, code="many")}
    body = {"input_ids": [5, 6], "sampling_params": {}}
    assert_error(await served.http.post("/generate", json=body), status=400, param="sampling_params.min_new_tokens")
    *_, error, _ = events(await served.http.post("/generate", json=body | {"stream": True}))
    assert json.loads(error)["error"]["message"] == "Invalid 'sampling_params.min_new_tokens': too many."


@pytest.mark.parametrize(
    "error",
    [of_second_tool(), UpstreamRefusalError("stop: no", status=429, type="limit", param="stop", code=None)],
)
def test_an_error_with_other_names_is_a_new_one_of_the_same_kind(error: RequestError) -> None:
    before = (str(error), dict(vars(error)))
    message, response = renamed(error, MESSAGE_NAMES), renamed(error, RESPONSE_NAMES)
    assert (str(error), dict(vars(error))) == before
    for new in (message, response):
        assert (type(new), new.status, new.type, new.code) == (type(error), error.status, error.type, error.code)
        assert str(new) == new.message
    assert "stop_sequences" in message.message and "stop_sequences" not in response.message
