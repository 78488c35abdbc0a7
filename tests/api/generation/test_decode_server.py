"""A decode server: the ticket of a request goes to the engine or is released at its maker, and is never lost."""

from typing import Any

import httpx
import pytest

from motet.api.http.admission import ANONYMOUS
from motet.testing.fake_engine import NOWHERE
from motet.transfer.ticket import Ticket, params_of
from motet.types import Role
from tests.api.engine_requests import group
from tests.api.serving import MODEL, PROMPT, ROUTES, Served, Serving, WatchedEngine, chunks, hello
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


TRACE = {"x-request-id": "asked"}
takes_prompts = pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])


async def decode_server(serve: Serving, **config: Any) -> Served:
    """A decode server whose requests all have the same id."""
    served = await serve(engine=WatchedEngine(role=Role.DECODE), **config)
    served.http.headers.update(TRACE)
    return served


@pytest.fixture
async def served(serve: Serving) -> Served:
    return await decode_server(serve)


def granted(served: Served, prompt: list[int] = PROMPT, *, count: int = 1) -> list[Ticket]:
    """Grants tickets whose leases are held. No lease may be left at the end of the test."""
    request = group(prompt=tuple(prompt))
    return [served.engine.leases.grant(request, NOWHERE, readers=1, block_size=16) for _ in range(count)]


def wire(tickets: list[Ticket]) -> list[dict[str, Any]]:
    return [params_of(ticket) for ticket in tickets]


def held(served: Served) -> list[Ticket]:
    return list(served.engine.leases.held.values())


async def test_the_ticket_goes_to_the_engine_with_all_choices(served: Served) -> None:
    (ticket,) = granted(served)
    body = (await served.complete(PROMPT, n=3, kv_transfer_params=params_of(ticket))).json()
    assert [choice["text"] for choice in body["choices"]] == ["hello 0", "hello 1", "hello 2"]
    assert body["kv_transfer_params"] is None
    (request,) = served.engine.requests
    assert (request.ticket, len(request.choices)) == (ticket, 3)
    assert (served.engine.record.pulls, served.engine.released) == (1, [])


@takes_prompts
async def test_without_a_cluster_key_no_ticket_of_a_client_is_taken_or_released(serve: Serving, path: str) -> None:
    served = await decode_server(serve, takes_tickets=False)
    (ticket,) = granted(served)
    body = {**ROUTES[path], "kv_transfer_params": params_of(ticket)}
    refused = await served.http.post(path, json=body)
    assert_error(refused, status=400, param="kv_transfer_params")
    assert "--cluster-key" in refused.text
    assert (served.engine.requests, served.engine.released) == ([], [])
    served.engine.leases.release(ticket)


@takes_prompts
async def test_a_stream_takes_a_ticket_and_does_not_mention_it(served: Served, path: str) -> None:
    (ticket,) = granted(served)
    body = {**ROUTES[path], "stream": True, "kv_transfer_params": params_of(ticket)}
    received = chunks(await served.http.post(path, json=body))
    assert not any("kv_transfer_params" in chunk for chunk in received)
    assert served.engine.requests[0].ticket == ticket


async def test_chat_takes_a_ticket_from_the_official_client(served: Served) -> None:
    message: Any = {"role": "user", "content": "hi"}
    tokens = (await served.http.post("/tokenize", json={"messages": [message]})).json()["tokens"]
    (ticket,) = granted(served, tokens)
    extra = {"kv_transfer_params": params_of(ticket)}
    completion = await served.openai.chat.completions.create(model=MODEL, messages=[message], n=2, extra_body=extra)
    assert [choice.message.content for choice in completion.choices] == ["hello 0", "hello 1"]
    assert served.engine.requests[0].ticket == ticket


async def test_a_ticket_for_the_start_of_the_prompt_is_taken(served: Served) -> None:
    (ticket,) = granted(served, [5, 6, 7])
    assert (await served.complete(PROMPT, kv_transfer_params=params_of(ticket))).status_code == 200
    assert served.engine.requests[0].ticket == ticket


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 1, "best_of": 3}])
async def test_of_a_list_the_first_ticket_is_used_and_the_others_are_released(
    served: Served, fields: dict[str, Any]
) -> None:
    tickets = granted(served, count=3)
    assert (await served.complete(PROMPT, kv_transfer_params=wire(tickets), **fields)).status_code == 200
    assert served.engine.requests[0].ticket == tickets[0]
    assert sorted(ticket.lease_id for ticket in served.engine.released) == [t.lease_id for t in tickets[1:]]
    assert served.engine.record.release_traces == ["asked"] * 2


async def test_one_lease_named_for_every_choice_is_one_ticket(served: Served) -> None:
    """A release of a copy would end the lease that the engine is about to use."""
    (ticket,) = granted(served)
    assert (await served.complete(PROMPT, n=4, kv_transfer_params=wire([ticket] * 4))).status_code == 200
    assert (served.engine.record.pulls, served.engine.released) == (1, [])


@pytest.mark.parametrize(("n", "count"), [(1, 2), (3, 1), (3, 2), (3, 4)])
async def test_a_list_of_another_length_is_refused_and_released(served: Served, n: int, count: int) -> None:
    response = await served.complete(PROMPT, n=n, kv_transfer_params=wire(granted(served, count=count)))
    assert_refused(served, response, "kv_transfer_params", released=count)


async def test_a_list_that_is_longer_than_any_group_is_not_even_read(served: Served) -> None:
    """Each entry can name another host to call, so a body of 8 MB would cause 25,000 calls."""
    (ticket,) = granted(served)
    assert (await served.complete(PROMPT, kv_transfer_params=wire([ticket] * 257))).status_code == 400
    assert served.engine.released == []
    served.engine.leases.release(ticket)


def assert_refused(served: Served, response: httpx.Response, param: str | None, *, released: int) -> None:
    assert response.status_code in (400, 404, 429, 503)
    assert response.json()["error"]["param"] == param
    assert len(served.engine.released) == released
    assert served.engine.record.release_traces == ["asked"] * released
    assert (held(served), served.engine.requests) == ([], [])


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [([5, 6, 9, 8], 3), ([5, 6, 7], 3), ([5, 6], 3), ([4, 5, 6, 7, 8], 3)],
    ids=["another token", "no last token", "too short", "shifted"],
)
async def test_a_ticket_for_another_prompt_is_refused_and_released(
    served: Served, prompt: list[int], num_tokens: int
) -> None:
    (ticket,) = granted(served)
    assert ticket.num_tokens == num_tokens
    response = await served.complete(prompt, kv_transfer_params=params_of(ticket))
    assert_refused(served, response, "kv_transfer_params", released=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "other"}, "model"),
        ({"n": 257}, "n"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"max_tokens": 5000}, "prompt"),
        ({"prompt": [[5, 6, 7, 8], [5, 6, 7, 8]]}, "kv_transfer_params"),
        ({"prompt": [9999, 1]}, "prompt"),
        ({"prompt": [5]}, "kv_transfer_params"),
    ],
)
async def test_a_request_refused_for_any_other_reason_releases_its_ticket(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": PROMPT, "kv_transfer_params": wire(granted(served))[0], **fields}
    response = await served.http.post("/v1/completions", json=body)
    assert_refused(served, response, param, released=1)


@takes_prompts
async def test_a_server_that_is_full_or_drains_releases_the_ticket(serve: Serving, path: str) -> None:
    full, draining = await decode_server(serve, max_waiting_groups=1), await decode_server(serve)
    place = full.service.admission.admit(1, client=ANONYMOUS)[0]
    draining.service.start_drain()
    for served in (full, draining):
        response = await served.http.post(path, json={**ROUTES[path], "kv_transfer_params": wire(granted(served))[0]})
        assert response.status_code == 503
        assert_refused(served, response, None, released=1)
    place.leave()


@takes_prompts
async def test_a_server_at_its_limit_releases_the_ticket(serve: Serving, path: str) -> None:
    served = await decode_server(serve, key_max_requests=1)
    served.service.key_limits.enter(ANONYMOUS, 1)
    response = await served.http.post(path, json={**ROUTES[path], "kv_transfer_params": wire(granted(served))[0]})
    assert response.status_code == 503
    assert_refused(served, response, None, released=1)
    served.service.key_limits.leave(ANONYMOUS, 1)


@pytest.mark.parametrize("broken", [{"version": 1}, {"num_tokens": 0}, {"tp_size": 2}, {"cached_tokens": 2**50}])
async def test_a_broken_ticket_is_refused_by_name(served: Served, broken: dict[str, Any]) -> None:
    (ticket,) = granted(served)
    response = await served.complete(PROMPT, kv_transfer_params=params_of(ticket) | broken)
    assert_error(response, status=400, param="kv_transfer_params")
    served.engine.leases.release(ticket)  # the server cannot know who owns it


async def test_keys_that_a_router_adds_to_a_ticket_are_ignored(served: Served) -> None:
    (ticket,) = wire(granted(served))
    response = await served.complete(PROMPT, kv_transfer_params=ticket | {"transfer_id": "t-1", "nested": {"a": [1]}})
    assert response.status_code == 200
    assert [wire([request.ticket]) for request in served.engine.requests if request.ticket] == [[ticket]]


async def test_valid_tickets_next_to_a_broken_one_are_released(served: Served) -> None:
    first, second, third = granted(served, count=3)
    broken = params_of(second) | {"version": 1}
    response = await served.complete(PROMPT, n=3, kv_transfer_params=[params_of(first), broken, params_of(third)])
    assert response.status_code == 400
    assert {ticket.lease_id for ticket in served.engine.released} == {first.lease_id, third.lease_id}
    served.engine.leases.release(second)


@pytest.mark.parametrize("params", [{}, [], "ticket", 1, {"do_remote_decode": True}, [None]])
async def test_an_invalid_ticket_is_refused_by_name(served: Served, params: object) -> None:
    response = await served.complete(PROMPT, kv_transfer_params=params)
    assert_refused(served, response, "kv_transfer_params", released=0)


async def test_other_servers_take_no_tickets(serve: Serving) -> None:
    for role in (Role.BOTH, Role.PREFILL):
        served = await serve(engine=WatchedEngine(role=role))
        (ticket,) = granted(served)
        assert_error(
            await served.complete(PROMPT, kv_transfer_params=params_of(ticket)), status=400, param="kv_transfer_params"
        )
        served.engine.leases.release(ticket)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_group_waits_ends_the_lease(serve: Serving, stream: bool) -> None:
    served = await serve(engine=WatchedEngine(hello, role=Role.DECODE, gated=True))
    ticket = wire(granted(served))[0]
    request = await served.engine.start_request(served.complete(PROMPT, stream=stream, kv_transfer_params=ticket))
    await served.abandon(request)
    assert held(served) == []
