"""Steered groups on fake vLLM servers: choices that end early, and the cost of choices that start later."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.serving import next_chunk
from tests.deploy.gateways import RunningGateway
from tests.deploy.test_vllm_gateway import PROMPT, body, gateway_of, pair_of, seeded, until_connected
from tests.peers.fake_vllm import FakeVLLM
from tests.peers.vllm_switches import Switches

pytestmark = pytest.mark.anyio

SEED, N = 5, 3
WRITTEN = seeded(N, SEED)
LAST = WRITTEN[1][3]
"""Ends choice 1 with its fourth token."""
PATH = "/inference/v1/generate"


@contextlib.asynccontextmanager
async def in_front(folder: Path, *, separate: bool) -> AsyncIterator[tuple[FakeVLLM, RunningGateway]]:
    """Yields a decode server that waits for steps, and its gateway. `separate`: True if another server prefills."""
    if separate:
        async with pair_of(folder) as (network, _, decode, gateway):
            await until_connected(network, decode)
            decode.hold()
            yield decode, gateway
        assert network.faults == []
    else:
        async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
            server.hold()
            yield server, gateway


async def start(server: FakeVLLM, *, separate: bool, requests: int) -> None:
    """Lets this number of requests generate their first token."""
    if separate:  # the others follow the first token of the one with the ticket
        await server.until(lambda: server.open == 1)
        server.step()
    await server.until(lambda: server.open == requests)
    server.step()


def of_choice(answer: dict[str, Any]) -> dict[int, tuple[str, list[int]]]:
    return {choice["index"]: (choice["finish_reason"], choice["token_ids"]) for choice in answer["choices"]}


def test_the_token_that_ends_a_choice_ends_no_other() -> None:
    assert [tokens[:6].count(LAST) for tokens in WRITTEN] == [0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True], ids=["together", "separate"])
async def test_choices_that_are_not_needed_are_closed_and_their_blocks_are_free(folder: Path, separate: bool) -> None:
    async with in_front(folder, separate=separate) as (server, gateway):
        aborted = server.counters.aborted
        request = body(N, seed=SEED, stop_token_ids=[LAST]) | {"group": {"stop_when": {"finished": 1}}}
        answering = asyncio.ensure_future(gateway.http.post(PATH, json=request))
        await start(server, separate=separate, requests=N)
        server.step(3)
        await server.until(lambda: server.open == 0)  # although it waits for steps
        choices = of_choice((await answering).json())
        assert {index: finish for index, (finish, _) in choices.items()} == {0: "abort", 1: "stop", 2: "abort"}
        for index, (_, tokens) in choices.items():
            assert tokens == WRITTEN[index][: len(tokens)]
        assert server.counters.aborted - aborted == 2
        held = server.counters.text(pinned_blocks=server.pinned_blocks())
        assert 'vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.0' in held


@pytest.mark.slow
async def test_choices_that_start_later_are_as_cheap_as_another_request_with_the_prompt(folder: Path) -> None:
    async with pair_of(folder) as (network, prefill, decode, gateway):
        await until_connected(network, decode)
        prefilled, computed = prefill.counters.local_compute, decode.counters.local_compute
        answer = await gateway.http.post(PATH, json=body(4, seed=SEED) | {"group": {"start": 1}})
        assert of_choice(answer.json()) == {i: ("length", tokens) for i, tokens in enumerate(seeded(4, SEED))}
        last_block = len(PROMPT) % prefill.block_size  # the others are in the prefix cache
        assert prefill.counters.local_compute - prefilled == len(PROMPT) + 3 * last_block
        assert decode.counters.local_compute == computed
    assert network.faults == []


@pytest.mark.slow
@pytest.mark.parametrize("scale_out", [False, True], ids=["completions", "generate"])
async def test_the_confidence_of_choices_is_known(folder: Path, scale_out: bool) -> None:
    async with FakeVLLM(switches=Switches(scale_out=scale_out)) as server, gateway_of(folder, server) as gateway:
        for below, finish in ((100.0, "abort"), (0.0, "length")):
            rule = {"window": 3, "top": 3, "below": below}
            answer = (
                await gateway.http.post(PATH, json=body(2, max_tokens=500) | {"group": {"confidence": rule}})
            ).json()
            assert {end for end, _ in of_choice(answer).values()} == {finish}
            assert answer["groups"][0]["confidence"]["lowest"].keys() == {"0", "1"}
            assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
        await server.until(lambda: server.open == 0)


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True], ids=["together", "separate"])
async def test_a_choice_of_a_group_that_is_one_request_is_ended_for_its_client(folder: Path, separate: bool) -> None:
    """vLLM continues to generate it, unread, until the request has no other open choices."""
    async with in_front(folder, separate=separate) as (server, gateway):
        request = body(N, seed=SEED, stop_token_ids=[LAST]) | {"stream": True}
        starting = asyncio.ensure_future(start(server, separate=separate, requests=2 if separate else 1))
        async with gateway.http.stream("POST", PATH, json=request) as response:
            await starting
            lines = response.aiter_lines()
            chunks = [await next_chunk(lines)]
            for index in (0, 2):
                path = f"/v1/groups/{chunks[0]['request_id']}/choices/{index}"
                assert (await gateway.http.delete(path)).json()["ended"] is True
            server.step(3)
            await server.until(lambda: server.open == 0)  # although choices 0 and 2 have not ended there
            while chunks[-1]:
                chunks.append(await next_chunk(lines))
    ends = {c["index"]: c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"] if c["finish_reason"]}
    assert ends == {0: "abort", 1: "stop", 2: "abort"}
