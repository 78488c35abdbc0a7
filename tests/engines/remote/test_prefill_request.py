"""The body of a prefill request: what it holds, and that a server which refuses unknown fields takes it."""

import pytest

from motet.engines.remote.prefill_request import Route, prefill_request
from motet.transfer.ticket import ticket_of
from tests.api.serving import Served

ORDER = {"do_remote_decode": True, "do_remote_prefill": False, "readers": 1}
AROUND: dict[str, object] = {"model": "tiny", "cache_salt": "s", "priority": 3}
DRAWN: dict[str, object] = {"temperature": 0.5, "seed": 1}
OF_THE_ANSWER: dict[str, object] = {"stop": ["x"], "stop_token_ids": [5], "include_stop_str_in_output": True}

CHAT: dict[str, object] = {
    **AROUND,
    **DRAWN,
    **OF_THE_ANSWER,
    "messages": [{"role": "user", "content": "hi"}],
    "n": 8,
    "max_completion_tokens": 50,
    "min_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 3,
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "return_token_ids": True,
}
COMPLETION: dict[str, object] = {
    **AROUND,
    **DRAWN,
    **OF_THE_ANSWER,
    "prompt": [[5, 6, 7], [8, 9, 10]],
    "n": 2,
    "best_of": 4,
    "max_tokens": 50,
    "min_tokens": 5,
    "echo": True,
    "logprobs": 2,
    "return_token_ids": True,
}
GENERATE: dict[str, object] = {
    **AROUND,
    "token_ids": [5, 6, 7],
    "request_id": "mine",
    "stream": True,
    "stream_options": {"include_usage": True},
    "sampling_params": {
        **DRAWN,
        **OF_THE_ANSWER,
        "n": 8,
        "max_tokens": 50,
        "min_tokens": 5,
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
}
BODIES = {Route.CHAT: CHAT, Route.COMPLETIONS: COMPLETION, Route.GENERATE: GENERATE}
every_route = pytest.mark.parametrize("route", Route)

ONE_TOKEN = {"n": 1, "max_tokens": 1, "min_tokens": 0}


def test_chat_has_one_token_by_both_names() -> None:
    assert prefill_request(Route.CHAT, CHAT) == {
        **AROUND,
        **DRAWN,
        **ONE_TOKEN,
        "messages": CHAT["messages"],
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": ORDER,
    }


def test_completions_have_one_prompt_and_no_field_of_chat() -> None:
    assert prefill_request(Route.COMPLETIONS, COMPLETION, prompt_number=1) == {
        **AROUND,
        **DRAWN,
        **ONE_TOKEN,
        "prompt": [8, 9, 10],
        "stream": False,
        "kv_transfer_params": ORDER,
    }


def test_generate_has_its_sampling_fields_nested() -> None:
    assert prefill_request(Route.GENERATE, GENERATE, readers=3) == {
        **AROUND,
        "token_ids": [5, 6, 7],
        "request_id": "mine",
        "sampling_params": {**DRAWN, **ONE_TOKEN},
        "stream": False,
        "kv_transfer_params": {**ORDER, "readers": 3},
    }


@pytest.mark.parametrize(
    ("prompt", "number", "one"),
    [
        ("text", 0, "text"),
        (["first", "second"], 1, "second"),
        ([5, 6, 7], 0, [5, 6, 7]),
        ((5, 6, 7), 0, (5, 6, 7)),
        ([[5, 6], [7, 8]], 1, [7, 8]),
    ],
)
def test_of_several_prompts_one_is_sent(prompt: object, number: int, one: object) -> None:
    assert prefill_request(Route.COMPLETIONS, {"prompt": prompt}, prompt_number=number)["prompt"] == one


def test_fields_that_the_client_did_not_send_and_a_server_may_not_know_are_not_added() -> None:
    assert prefill_request(Route.COMPLETIONS, {"prompt": "text"}).keys() == {
        "prompt",
        "n",
        "max_tokens",
        "stream",
        "kv_transfer_params",
    }


def test_tools_stay_because_they_are_part_of_the_prompt_but_none_is_called() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = prefill_request(Route.CHAT, {**CHAT, "tools": tools, "tool_choice": "required"})
    assert body["tools"] == tools
    assert body["tool_choice"] == "none"


@every_route
def test_the_clients_body_is_left_as_it_is(route: Route) -> None:
    before = {**BODIES[route]}
    prefill_request(route, BODIES[route])
    assert BODIES[route] == before


@pytest.mark.anyio
@every_route
async def test_a_server_that_refuses_unknown_fields_takes_it_and_answers_with_a_ticket(
    prefill_server: Served, route: Route
) -> None:
    refused = await prefill_server.http.post(route, json={**prefill_request(route, BODIES[route]), "no_such_field": 1})
    assert refused.json()["error"]["code"] == "unknown_parameter"
    response = await prefill_server.http.post(route, json=prefill_request(route, BODIES[route]))
    assert response.status_code == 200, response.text
    engine = prefill_server.engine
    engine.leases.end(ticket_of(response.json()["kv_transfer_params"]))
    (request,) = engine.prefills
    assert len(request.choices) == 1
    assert (request.cache_salt, request.priority) == ("s", 3)
