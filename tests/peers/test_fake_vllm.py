"""Tests of the fake vLLM server: the behaviour that tests of its clients rely on."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.peers.fake_vllm import MODEL, FakeVLLM
from tests.peers.vllm_tickets import Held, Network
from tests.peers.vllm_tokens import EOS, expected_tokens, is_continuation

pytestmark = pytest.mark.anyio

PROMPT = list(range(10, 50))
TICKET_REQUEST = {"do_remote_decode": True, "do_remote_prefill": False}
TOKENS = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


async def complete(server: FakeVLLM, **fields: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        return await client.post("/v1/completions", json={"prompt": PROMPT, **TOKENS, **fields})


async def ticket_of(server: FakeVLLM) -> dict[str, Any]:
    """Prefills PROMPT on the server, and returns the ticket."""
    response = await complete(server, max_tokens=1, kv_transfer_params=TICKET_REQUEST)
    ticket: dict[str, Any] = response.json()["kv_transfer_params"]
    return ticket


def tokens_of(response: httpx.Response) -> list[list[int]]:
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.slow
async def test_a_choice_resumed_with_its_output_tokens_continues_as_if_undisturbed() -> None:
    async with FakeVLLM() as server:
        (complete_tokens,) = tokens_of(await complete(server, temperature=0))
        assert complete_tokens == expected_tokens(PROMPT, 12)
        (rest,) = tokens_of(await complete(server, temperature=0, prompt=PROMPT + complete_tokens[:5], max_tokens=7))
        assert complete_tokens[5:] == rest
        sampled = tokens_of(await complete(server, n=3))
        assert len({tuple(tokens) for tokens in sampled}) == 3
        (rest,) = tokens_of(await complete(server, prompt=PROMPT + sampled[2][:5], max_tokens=7))
        assert sampled[2][5:] == rest
        assert all(is_continuation(PROMPT, tokens) for tokens in sampled)
        assert not is_continuation(PROMPT, [*sampled[0][:3], *sampled[1][3:]])
        server.check()


@pytest.mark.slow
async def test_a_choice_ends_at_a_stop_token_or_eos_and_not_before_min_tokens() -> None:
    async with FakeVLLM() as server:
        third = expected_tokens(PROMPT, 3)[2]
        (choice,) = (await complete(server, temperature=0, stop_token_ids=[third])).json()["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"], choice["stop_reason"]) == (3, "stop", third)
        (choice,) = (await complete(server, temperature=0, stop_token_ids=[third], min_tokens=3)).json()["choices"]
        assert third not in choice["token_ids"][:3]
        tokens = (await complete(server, temperature=0, ignore_eos=False, max_tokens=4000)).json()["choices"][0]
        assert tokens["token_ids"][-1] == EOS and tokens["finish_reason"] == "stop" and tokens["stop_reason"] is None


@pytest.mark.slow
async def test_a_ticket_is_read_once_and_a_second_read_is_a_fault_with_wrong_tokens() -> None:
    network = Network()
    async with FakeVLLM(network=network) as prefill, FakeVLLM(network=network) as decode:
        ticket = await ticket_of(prefill)
        assert network.pinned == [ticket["remote_request_id"]]
        (tokens,) = tokens_of(await complete(decode, temperature=0, kv_transfer_params=ticket))
        assert tokens == expected_tokens(PROMPT, 12)
        decode.check()
        (tokens,) = tokens_of(await complete(decode, temperature=0, kv_transfer_params=ticket))
        assert tokens != expected_tokens(PROMPT, 12)
        assert len(network.faults) == 1
        assert network.reads(ticket["remote_request_id"]) == 2


@pytest.mark.slow
async def test_a_ticket_for_another_prompt_or_several_choices_is_a_fault() -> None:
    network = Network()
    async with FakeVLLM(network=network) as prefill, FakeVLLM(network=network) as decode:
        for fields in ({"prompt": PROMPT[:-1]}, {"n": 2}):
            ticket = await ticket_of(prefill)
            await complete(decode, kv_transfer_params=ticket, **fields)
        assert len(network.faults) == 2


@pytest.mark.slow
async def test_a_rejected_completion_releases_its_ticket_and_the_other_dialect_does_not() -> None:
    network = Network()
    async with FakeVLLM(network=network) as prefill, FakeVLLM(network=network) as decode:
        decode.switches.scale_out = True
        ticket = await ticket_of(prefill)
        body = {"token_ids": [1], "sampling_params": {"n": 2, "temperature": 0}, "kv_transfer_params": ticket}
        async with httpx.AsyncClient(base_url=decode.url, timeout=PATIENCE_S) as client:
            assert (await client.post("/inference/v1/generate", json=body)).status_code == 400
        assert network.pinned != []
        answer = await complete(decode, prompt=[1], max_tokens=10**9, kv_transfer_params=ticket)
        assert answer.status_code == 400
        assert network.prefilled[ticket["remote_request_id"]].held is Held.REJECTED
        assert network.transfers == 0
        decode.check()


@pytest.mark.slow
async def test_a_pull_that_hangs_is_ended_by_its_client_and_one_from_a_dead_server_fails() -> None:
    network = Network()
    async with FakeVLLM(network=network) as prefill, FakeVLLM(network=network) as decode:
        ticket = await ticket_of(prefill)
        decode.switches.pull_hangs = True
        answering = asyncio.create_task(complete(decode, kv_transfer_params=ticket))
        await decode.until(lambda: network.pulling == 1)
        answering.cancel()
        await decode.until(lambda: decode.counters.aborted == 1)
        decode.check()
        decode.switches.pull_hangs = False
        ticket = await ticket_of(prefill)
        await prefill.kill()
        assert (await complete(decode, kv_transfer_params=ticket)).status_code == 500
        streamed = await complete(decode, kv_transfer_params=ticket, stream=True)
        assert chunks_of(streamed)[-1]["error"]["code"] == 500


async def test_a_test_controls_the_progress_and_a_killed_server_returns_as_a_new_one() -> None:
    async with FakeVLLM(stepped=True) as server:
        answering = asyncio.create_task(complete(server))
        await server.until(lambda: server.open == 1)
        server.step(5)
        await server.until(lambda: server.counters.generated_tokens == 5)
        assert not answering.done()
        started_s, engine_id = server.counters.started_s, server.id
        await server.kill()
        with pytest.raises(httpx.HTTPError):
            await answering
        await server.start()
        assert server.counters.started_s > started_s and server.id != engine_id
        server.run()
        assert len(tokens_of(await complete(server))[0]) == 12
        server.check()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"temperature": 0, "n": 2}, 400),
        ({"model": "nope"}, 404),
        ({"prompt": [1] * 4096}, 400),
        ({"max_tokens": 10**9}, 400),
        ({"prompt": [10**6]}, 400),
        ({"logprobs": 50}, 400),
        ({"stream_options": {"include_usage": True}}, 400),
        ({"model": MODEL}, 200),
        ({"model": "adapter"}, 200),
    ],
)
async def test_it_refuses_the_requests_that_vllm_refuses(fields: dict[str, object], status: int) -> None:
    async with FakeVLLM(adapters=("adapter",)) as server:
        assert (await complete(server, **fields)).status_code == status


async def test_it_answers_the_requests_of_a_probe() -> None:
    async with (
        FakeVLLM(adapters=("adapter",)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        await complete(server)
        await complete(server)
        metrics = (await client.get("/metrics")).text
        assert 'source="local_compute"} 48.0' in metrics and 'source="local_cache_hit"} 32.0' in metrics
        assert 'vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.0' in metrics
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), ("adapter", MODEL)]
        assert (await client.get("/kv_event_sources")).status_code == 404
        assert (await client.get("/version")).json() == {"version": "0.32.0"}
        server.switches.healthy = False
        assert (await client.get("/health")).status_code == 503
