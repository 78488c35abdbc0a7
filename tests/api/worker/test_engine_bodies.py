"""Bodies that a gateway may not send: each is refused with a reason, and its ticket is released."""

import asyncio
from collections.abc import Mapping

import msgspec
import pytest
from msgspec.structs import replace

from motet.engines.wire import PROTOCOL, PROTOCOL_HEADER
from motet.testing.fake_engine import NOWHERE
from motet.transfer.ticket import Ticket
from motet.types import SAMPLING_FIELDS, ChoiceStart, GenerateRequest, Role, choice_starts
from tests.api.engine_requests import POSTS, group, message, post
from tests.api.serving import Served, Serving, WatchedEngine
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

GARBAGE = {
    "nothing": b"",
    "text": b"<html>",
    "no msgpack": b"\xc1",
    "a list": msgspec.msgpack.encode([1]),
    "an empty object": b"\x80",
    "cut": msgspec.msgpack.encode(group())[:-3],
    "more": msgspec.msgpack.encode(group()) + b"\x01",
    "a list of four thousand million": b"\xdd\xff\xff\xff\xff",
    "a text of four thousand million": b"\xdb\xff\xff\xff\xff",
    "no unicode": b"\x81\xa1\xff\x01",
    "nested": b"\x91" * 100_000,
    "nested where anything may be": b"\x81\xa5other" + b"\x91" * 100_000,
    "wrong types": msgspec.msgpack.encode({"prompt": "x", "engine_id": 1, "request_id": 5, "lease_id": "x"}),
}


@pytest.mark.parametrize("path", list(POSTS))
@pytest.mark.parametrize("body", list(GARBAGE.values()), ids=list(GARBAGE))
async def test_an_invalid_body_is_refused_and_its_fault_named(refusing: Served, path: str, body: bytes) -> None:
    response = await post(refusing, path, body)
    assert_error(response, status=400, code="invalid_body")
    assert message(response).startswith(f"The body is not a {POSTS[path]} in msgpack: ")


@pytest.mark.parametrize("path", list(POSTS))
async def test_another_protocol_is_refused_before_the_body_is_read(refusing: Served, path: str) -> None:
    for headers in ({}, {PROTOCOL_HEADER: str(PROTOCOL + 1)}):
        response = await refusing.http.post(path, content=b"\xc1", headers=headers)
        assert_error(response, status=400, code="engine_protocol")
        assert f"speaks engine protocol {PROTOCOL}" in message(response)


SAMPLING = group().sampling
REFUSED: Mapping[str, tuple[GenerateRequest, str]] = {
    "no prompt": (group(prompt=()), "prompt"),
    "unknown token": (group(prompt=(5, 512)), "prompt"),
    "negative token": (group(prompt=(-1, 5)), "prompt"),
    "huge token": (group(prompt=(2**64 - 1,)), "prompt"),
    "too long": (group(prompt=(5,) * 4090), "prompt"),
    "no id": (group(request_id=""), "request_id"),
    "an id of two lines": (group(request_id="a\nb"), "request_id"),
    "a trace of two lines": (group(trace="a\nb"), "trace"),
    "a long session": (group(session_id="x" * 201), "session_id"),
    "priority": (group(priority=2**63), "priority"),
    "client": (group(client="two words"), "client"),
    "weight": (group(client_weight=float("nan")), "client_weight"),
    "weight of nothing": (group(client_weight=0.0), "client_weight"),
    "kept for ever": (group(keep_s=float("inf")), "keep_s"),
    "kept for no number of seconds": (group(keep_s=float("nan")), "keep_s"),
    "no choices": (group(choices=()), "choices"),
    "too many choices": (group(choices=choice_starts(1025, 0)), "choices"),
    "a choice twice": (group(choices=(ChoiceStart(1, 0), ChoiceStart(1, 1))), "choices"),
    "index": (group(choices=(ChoiceStart(-1, 0),)), "choices"),
    "seed": (group(choices=(ChoiceStart(0, -1),)), "choices"),
    "written": (group(choices=(ChoiceStart(0, 0, (5, 512)),)), "choices"),
    "all written": (group(choices=(ChoiceStart(0, 0, (5,) * 9),)), "choices"),
    "max_tokens": (group(sampling=replace(SAMPLING, max_tokens=0)), "max_tokens"),
    "scored after the prompt": (group(scored_from=5000), "scored_from"),
    "min_tokens": (group(sampling=replace(SAMPLING, min_tokens=10)), "min_tokens"),
    "temperature": (group(sampling=replace(SAMPLING, temperature=float("nan"))), "temperature"),
    "top_p": (group(sampling=replace(SAMPLING, top_p=0.0)), "top_p"),
    "repetition": (group(sampling=replace(SAMPLING, repetition_penalty=0.0)), "repetition_penalty"),
    "top_k": (group(sampling=replace(SAMPLING, top_k=-1)), "top_k"),
    "logprobs": (group(sampling=replace(SAMPLING, logprobs=1001)), "logprobs"),
    "many scores": (group(prompt=(5,) * 3000, sampling=replace(SAMPLING, prompt_logprobs=1000)), "prompt"),
    "bias of an unknown token": (group(sampling=replace(SAMPLING, logit_bias={512: 1.0})), "logit_bias"),
    "infinite bias": (group(sampling=replace(SAMPLING, logit_bias={5: float("inf")})), "logit_bias"),
    "no number for a bias": (group(sampling=replace(SAMPLING, logit_bias={5: float("nan")})), "logit_bias"),
    "allowed token": (group(sampling=replace(SAMPLING, allowed_token_ids=(5, 512))), "allowed_token_ids"),
    "named token": (group(sampling=replace(SAMPLING, logprob_token_ids=(512,))), "logprob_token_ids"),
    "stop token": (group(sampling=replace(SAMPLING, stop_token_ids=(-1,))), "stop_token_ids"),
}


@pytest.mark.parametrize(("request_", "param"), list(REFUSED.values()), ids=list(REFUSED))
async def test_a_group_that_no_client_could_have_requested_is_refused(
    refusing: Served, request_: GenerateRequest, param: str
) -> None:
    assert_error(await post(refusing, "/engine/generate", request_), status=400, param=param)


@pytest.mark.parametrize("name", [name for name, field in SAMPLING_FIELDS.items() if field.low is not None])
async def test_every_declared_range_is_checked(refusing: Served, name: str) -> None:
    field = SAMPLING_FIELDS[name]
    assert field.low is not None and field.high is not None
    for value in (field.low - 1, field.high + 1, *([field.low] if field.above_low else [])):
        field_value: object = {5: value} if name == "logit_bias" else value
        body = {**msgspec.to_builtins(group()), "sampling": {"max_tokens": 9, name: field_value}}
        response = await post(refusing, "/engine/generate", body)
        assert_error(response, status=400, param=name)
        assert f"{field.words} is allowed" in response.json()["error"]["message"]


def granted(served: Served, prompt: tuple[int, ...] = (5, 6, 7)) -> Ticket:
    return served.engine.leases.grant(group(prompt=prompt), NOWHERE, readers=1, block_size=16)


@pytest.mark.parametrize("why", ["draining", "open already", "bad field", "another prompt", "takes none"])
async def test_the_ticket_of_a_refused_group_is_released(serve: Serving, why: str) -> None:
    served = await serve(engine=WatchedEngine(role=Role.BOTH if why == "takes none" else Role.DECODE, gated=True))
    ticket = granted(served, (5, 6, 8) if why == "another prompt" else (5, 6, 7))
    body = group(ticket=ticket)
    opened = None
    if why == "open already":
        opened = await served.engine.start_request(post(served, "/engine/generate", group()))
    if why == "draining":
        served.service.start_drain()
    if why == "bad field":
        body = replace(body, priority=2**63)
    if why == "another prompt":
        body = replace(body, prompt=(5, 7, 6))
    assert (await post(served, "/engine/generate", body)).status_code in (400, 503)
    assert served.engine.released == [ticket]
    if opened is not None:
        opened.cancel()
        await asyncio.wait([opened])
        await served.until_empty()


async def test_an_impossible_ticket_is_not_even_released(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(role=Role.DECODE))
    ticket = replace(granted(served), remote_host="elsewhere.test")
    for path, body in (("/engine/generate", group(ticket=ticket)), ("/engine/release", ticket)):
        response = await post(served, path, body)
        assert response.status_code == 400
        assert "must be an IP address" in message(response)
    assert served.engine.released == []
    served.engine.leases.held.clear()
