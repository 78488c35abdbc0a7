"""A prefill server turns an order into a ticket, in the shape of each route. Clients that leave cause no leaks."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from motet.api.app import create_app
from motet.errors import EngineError
from motet.transfer.ticket import Ticket, params_of, prompt_digest, ticket_of
from motet.types import GenerateRequest, Role
from tests.api.serving import (
    PROMPT,
    ROUTES,
    Served,
    Serving,
    WatchedEngine,
    chunks,
    every_route,
    post_to,
    streamed_or_not,
)
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

ORDER = {"do_remote_decode": True, "do_remote_prefill": False}
VLLM_NULLS = dict.fromkeys(("token_ids", "prompt_token_ids", "prompt_logprobs"))


class Waiting:
    """A prefill that lasts until the test ends it."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, _: GenerateRequest) -> None:
        self.started.set()
        await self.go_on.wait()


@pytest.fixture
async def served(serve: Serving) -> Served:
    return await serve(engine=WatchedEngine(role=Role.PREFILL))


def taken(served: Served, params: object) -> Ticket:
    """Returns the ticket in an answer, checks that its lease is held, and ends it."""
    ticket = ticket_of(params)
    assert list(served.engine.leases.held.values()) == [ticket]
    served.engine.leases.release(ticket)
    return ticket


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_prefill_request_of_llm_d_s_sidecar_is_accepted(served: Served, path: str) -> None:
    """The sidecar reduces the client's request to one token, in all fields at once."""
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    limits = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "stream": False}
    order = ORDER | nulls | {"transfer_id": "t-1", "priority": {"of": "the router"}}
    response = await served.http.post(path, json={**ROUTES[path], **limits, "kv_transfer_params": order})
    assert response.status_code == 200, response.text
    taken(served, response.json()["kv_transfer_params"])


async def test_on_generate_the_order_can_be_in_extra_args_as_dynamo_s_proxies_send_it(served: Served) -> None:
    path, tokens = "/inference/v1/generate", {"token_ids": PROMPT}
    body = tokens | {"sampling_params": {"extra_args": {"kv_transfer_params": ORDER}}}
    for same in ({}, {"kv_transfer_params": ORDER}):
        response = await served.http.post(path, json=body | same)
        assert response.status_code == 200, response.text
        taken(served, response.json()["kv_transfer_params"])
    other = await served.http.post(path, json=body | {"kv_transfer_params": {"do_remote_decode": False}})
    assert_error(other, status=400, param="sampling_params.extra_args.kv_transfer_params")
    more = {"extra_args": {"kv_transfer_params": ORDER, "ec_transfer_params": {"other": 1}}}
    assert_error(await served.http.post(path, json=tokens | {"sampling_params": more}), status=400)
    none = {"extra_args": {"kv_transfer_params": None}}
    assert (await served.http.post(path, json=tokens | {"sampling_params": none})).json()["kv_transfer_params"] is None


async def test_an_order_is_answered_with_a_ticket_and_no_text(served: Served) -> None:
    response = await served.complete(PROMPT, kv_transfer_params=ORDER)
    body = response.json()
    ticket = taken(served, body["kv_transfer_params"])
    assert (ticket.num_tokens, ticket.prompt_digest, ticket.readers) == (3, prompt_digest(PROMPT[:3]), 1)
    assert body["kv_transfer_params"] == json.loads(msgspec.json.encode(params_of(ticket)))
    assert body["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None, **VLLM_NULLS},
    ]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 0
    (request,) = served.engine.prefills
    assert (request.prompt, served.engine.requests) == (tuple(PROMPT), [])


async def test_chat_answers_with_a_ticket_in_its_own_shape(served: Served) -> None:
    completion = await served.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], extra_body={"kv_transfer_params": ORDER}
    )
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "", "length")
    taken(served, (completion.model_extra or {})["kv_transfer_params"])


async def test_generate_answers_with_a_ticket_in_its_own_shape(served: Served) -> None:
    body = {**ROUTES["/inference/v1/generate"], "request_id": "mine", "kv_transfer_params": ORDER}
    answer = (await served.http.post("/inference/v1/generate", json=body)).json()
    assert answer["request_id"] == "mine"
    assert answer["choices"] == [
        {
            "index": 0,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [],
            "weight_versions": [],
        }
    ]
    taken(served, answer["kv_transfer_params"])


@every_route
async def test_a_stream_has_the_ticket_on_the_choices_last_chunk(served: Served, path: str) -> None:
    response = await served.http.post(path, json={**ROUTES[path], "stream": True, "kv_transfer_params": ORDER})
    *before, last = chunks(response)
    assert not any("kv_transfer_params" in chunk for chunk in before)
    assert not any(choice["finish_reason"] for chunk in before for choice in chunk["choices"])
    (choice,) = last["choices"]
    assert choice["finish_reason"] == "length"
    taken(served, last["kv_transfer_params"])


async def test_usage_of_a_stream_counts_the_prompt_and_no_tokens(served: Served) -> None:
    options = {"include_usage": True}
    response = await served.complete(PROMPT, stream=True, stream_options=options, kv_transfer_params=ORDER)
    *_, last_of_choice, usage = chunks(response)
    assert (usage["choices"], usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == ([], 4, 0)
    taken(served, last_of_choice["kv_transfer_params"])


@every_route
async def test_n_is_one_prefill_and_one_choice(served: Served, path: str) -> None:
    """Some gateways send the client's n to both sides, which causes n prefills on other servers."""
    fields: dict[str, Any] = {**ROUTES[path], "kv_transfer_params": ORDER}
    sampling = {"n": 8, "temperature": 0.5}
    fields |= {"sampling_params": sampling} if "sampling_params" in fields else sampling
    body = (await served.http.post(path, json=fields)).json()
    assert len(body["choices"]) == len(served.engine.prefills) == len(served.engine.prefills[0].choices) == 1
    taken(served, body["kv_transfer_params"])


async def test_fields_about_the_answer_have_no_effect(served: Served) -> None:
    fields = {"echo": True, "logprobs": 2, "best_of": 9, "n": 3, "stop": ["x"], "max_tokens": 7}
    body = (await served.complete("some prompt", kv_transfer_params=ORDER, **fields)).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["logprobs"]) == ("", None)
    taken(served, body["kv_transfer_params"])


async def test_a_ticket_has_the_requested_number_of_readers(served: Served) -> None:
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "tp_size"))
    body = (await served.complete(PROMPT, kv_transfer_params=ORDER | nulls | {"readers": 64})).json()
    assert taken(served, body["kv_transfer_params"]).readers == 64


@every_route
async def test_ordinary_requests_are_answered_as_usual(served: Served, path: str) -> None:
    body = (await served.http.post(path, json={**ROUTES[path], "kv_transfer_params": None})).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(fake_answer("hello 0"))
    assert body["kv_transfer_params"] is None


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"do_remote_decode": False},
        {"do_remote_decode": 1},
        ORDER | {"readers": 0},
        ORDER | {"readers": 65},
        ORDER | {"readers": True},
        ORDER | {"remote_host": "elsewhere"},
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_engine_id": "a", "version": 2},
        [],
        [ORDER],
        "yes",
        1,
    ],
)
async def test_an_invalid_order_is_refused_by_name(served: Served, params: object) -> None:
    assert_error(await served.complete(PROMPT, kv_transfer_params=params), status=400, param="kv_transfer_params")
    assert served.engine.prefills == served.engine.requests == []


@pytest.mark.parametrize("params", [{"do_remote_decode": "\ud800"}, ORDER | {"readers": "\ud800"}, {"\ud800": 1}])
async def test_an_order_with_half_of_a_surrogate_pair_is_refused(served: Served, params: object) -> None:
    """msgspec raises UnicodeEncodeError for such a text; the client got a 500."""
    body = json.dumps({"prompt": PROMPT, "kv_transfer_params": params})
    response = await served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert_error(response, status=400, param="kv_transfer_params")


@pytest.mark.parametrize("prompt", [["x y", "z w"], [[5, 6], [7, 8]], [5]], ids=["texts", "token ids", "one token"])
async def test_several_prompts_and_prompts_of_one_token_cannot_be_prefilled(served: Served, prompt: object) -> None:
    assert_error(await served.complete(prompt, kv_transfer_params=ORDER), status=400, param="kv_transfer_params")
    assert served.engine.prefills == []


async def test_prefills_and_answers_share_one_admission_limit(serve: Serving) -> None:
    waiting = Waiting()
    served = await serve(engine=WatchedEngine(role=Role.PREFILL, during_prefill=waiting))
    prefill = asyncio.create_task(served.complete(PROMPT, kv_transfer_params=ORDER))
    await waiting.started.wait()
    assert (served.service.admission.waiting, served.service.admission.open) == (1, 1)
    waiting.go_on.set()
    taken(served, (await prefill).json()["kv_transfer_params"])


@every_route
@streamed_or_not
async def test_a_client_that_leaves_during_a_prefill_ends_it(serve: Serving, path: str, stream: bool) -> None:
    waiting = Waiting()
    served = await serve(engine=WatchedEngine(role=Role.PREFILL, during_prefill=waiting))
    body = {**ROUTES[path], "stream": stream, "kv_transfer_params": ORDER}
    request = asyncio.create_task(served.http.post(path, json=body))
    await waiting.started.wait()
    await served.abandon(request)
    assert 'motet:groups_total{model_name="tiny",status="499"} 1.0' in await served.metrics()


@streamed_or_not
async def test_a_ticket_that_could_not_be_sent_is_released(served: Served, stream: bool) -> None:
    """The client leaves between the end of the prefill and the first byte."""
    body = json.dumps({"prompt": PROMPT, "stream": stream, "kv_transfer_params": ORDER}).encode()
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])
    stuck = asyncio.Event()

    async def receive() -> Message:
        for request in requests:
            return request
        await stuck.wait()
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        stuck.set()
        await asyncio.Event().wait()

    await create_app(served.service)(post_to("/v1/completions"), receive, send)
    (ticket,) = served.engine.released
    assert ticket.num_tokens == 3
    assert served.engine.leases.held == {}


async def test_a_prefill_that_fails_has_the_status_of_its_error(serve: Serving) -> None:
    async def fail(_: GenerateRequest) -> None:
        raise EngineError("broke")

    served = await serve(engine=WatchedEngine(role=Role.PREFILL, during_prefill=fail))
    for stream in (False, True):
        assert_error(
            await served.complete(PROMPT, stream=stream, kv_transfer_params=ORDER), status=500, code="engine_error"
        )


async def test_a_prefill_is_counted_as_any_group(served: Served) -> None:
    body = (await served.complete(PROMPT, kv_transfer_params=ORDER)).json()
    text = await served.metrics()
    assert 'motet:groups_total{model_name="tiny",status="200"} 1.0' in text
    assert 'motet:prefills_total{model_name="tiny",role="prefill",worker="engine-0"} 1.0' in text
    assert 'motet:request_prompt_tokens_sum{model_name="tiny"} 4.0' in text
    taken(served, body["kv_transfer_params"])


async def test_neither_kind_of_server_takes_the_other_s_params(serve: Serving) -> None:
    for role in (Role.BOTH, Role.DECODE):
        served = await serve(engine=WatchedEngine(role=role))
        assert_error(await served.complete(PROMPT, kv_transfer_params=ORDER), status=400, param="kv_transfer_params")
        assert served.engine.requests == []
