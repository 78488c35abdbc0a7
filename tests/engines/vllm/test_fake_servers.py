"""Groups on fake vLLM servers over real sockets, over both routes. Equality is the oracle."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from motet.engine import Engine
from motet.engines.http import server_client
from motet.engines.vllm.vllm_engine import VLLMEngine
from motet.errors import EngineDiedError
from motet.ids import ModelName, RequestId
from motet.metrics.routing import TicketLog
from motet.types import ChoiceStart, GenerateRequest, SamplingParams
from tests.engines.vllm import scripted_vllm
from tests.peers.fake_vllm import MODEL, FakeVLLM
from tests.peers.vllm_switches import Switches
from tests.peers.vllm_tickets import Held, Network
from tests.peers.vllm_tokens import Kind, expected_tokens

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("scale_out", [False, True])]

PROMPT = tuple(range(10, 50))
DRAWN = SamplingParams(max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
NEVER_S = 60.0


def group(
    *,
    n: int = 4,
    choices: tuple[ChoiceStart, ...] | None = None,
    sampling: SamplingParams = DRAWN,
    seeded: bool = True,
    stops: bool = False,
) -> GenerateRequest:
    request = scripted_vllm.group(n=n, choices=choices, sampling=sampling, seeded=seeded, stops=stops)
    return msgspec.structs.replace(request, prompt=PROMPT, model=ModelName(MODEL), cache_salt="", priority=0)


async def tokens_of(engine: Engine, request: GenerateRequest) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for delta in engine.generate(request):
        for choice in delta.choices:
            tokens.setdefault(choice.index, []).extend(choice.token_ids)
    return tokens


def seeded(n: int) -> dict[int, list[int]]:
    """Returns the tokens of choices with the seeds 7, 8, ..."""
    return {index: expected_tokens(PROMPT, 12, Kind(seed=7 + index)) for index in range(n)}


@dataclass
class Pair:
    """Two servers that can fetch from each other."""

    prefill_server: FakeVLLM
    decode_server: FakeVLLM
    prefill: VLLMEngine
    decode: VLLMEngine
    network: Network
    figures: TicketLog

    async def request_with_ticket(self, request: GenerateRequest) -> GenerateRequest:
        return msgspec.structs.replace(request, ticket=await self.prefill.prefill(request))

    @property
    def held(self) -> list[Held]:
        return [entry.held for entry in self.network.prefilled.values()]


@asynccontextmanager
async def pair(*, scale_out: bool, leader_timeout_s: float = NEVER_S, stepped: bool = False) -> AsyncIterator[Pair]:
    """Runs two fake servers, and checks at the end that nothing is open, pinned or wrong."""
    network, figures = Network(), TicketLog()
    switches = [Switches(scale_out=scale_out) for _ in range(2)]
    async with (
        FakeVLLM(network=network, switches=switches[0]) as prefill_server,
        FakeVLLM(network=network, switches=switches[1]) as decode_server,
        server_client() as client,
    ):
        engines: list[VLLMEngine] = []
        for fake in (prefill_server, decode_server):
            server = scripted_vllm.PatientVLLMServer(fake.url, client)
            report = await server.report()
            engines.append(VLLMEngine(server, report, tickets=figures, leader_timeout_s=leader_timeout_s))
        if stepped:
            decode_server.hold()
        yield Pair(prefill_server, decode_server, engines[0], engines[1], network, figures)
        for engine in engines:
            await engine.close()
            engine.check()
        await decode_server.until(lambda: not decode_server.open and not network.pulling and not network.pinned)
        prefill_server.check()
        decode_server.check()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_group_of_n_equals_n_groups_of_one(scale_out: bool, stops: bool) -> None:
    async with pair(scale_out=scale_out) as there:
        complete = await tokens_of(there.decode, group(stops=stops))
        assert complete == seeded(4)
        for start in group().choices:
            assert await tokens_of(there.decode, group(choices=(start,))) == {start.index: complete[start.index]}


async def test_greedy_choices_are_one_request(scale_out: bool) -> None:
    async with pair(scale_out=scale_out) as there:
        assert await tokens_of(there.decode, group(sampling=GREEDY)) == dict.fromkeys(
            range(4), expected_tokens(PROMPT, 12)
        )
        assert there.decode_server.counters.finished == 1 + (not scale_out)  # the report needs one to learn the kind


async def test_resumed_greedy_choices_continue_like_undisturbed_ones(scale_out: bool) -> None:
    complete = expected_tokens(PROMPT, 12)
    choices = tuple(ChoiceStart(index, 7, tuple(complete[: 3 * index])) for index in range(4))
    async with pair(scale_out=scale_out) as there:
        rest = await tokens_of(there.decode, group(choices=choices, sampling=GREEDY))
        assert rest == {index: complete[3 * index :] for index in range(4)}


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("n", [1, 4])
async def test_separate_prefill_and_decode_generate_the_tokens_of_one_server_with_one_transfer(
    scale_out: bool, n: int, stops: bool
) -> None:
    async with pair(scale_out=scale_out) as there:
        request = await there.request_with_ticket(group(n=n, stops=stops))
        assert await tokens_of(there.decode, request) == seeded(n)
        assert (there.network.transfers, there.held) == (1, [Held.READ])
        assert there.figures.pull_fallbacks.total() == there.figures.tickets_unused.total() == 0


async def test_a_greedy_group_on_separate_servers_has_the_tokens_of_one_server(scale_out: bool) -> None:
    async with pair(scale_out=scale_out) as there:
        request = await there.request_with_ticket(group(sampling=GREEDY))
        assert await tokens_of(there.decode, request) == dict.fromkeys(range(4), expected_tokens(PROMPT, 12))
        assert there.network.transfers == 1


async def test_a_resumed_group_fetches_its_prompt_by_a_scout(scale_out: bool) -> None:
    complete = expected_tokens(PROMPT, 12)
    choices = tuple(ChoiceStart(index, 7, tuple(complete[: 2 + index])) for index in range(3))
    async with pair(scale_out=scale_out) as there:
        request = await there.request_with_ticket(group(choices=choices, sampling=GREEDY))
        assert await tokens_of(there.decode, request) == {index: complete[2 + index :] for index in range(3)}
        assert (there.network.transfers, there.held) == (1, [Held.READ])


async def test_a_failed_pull_changes_only_the_figures(scale_out: bool) -> None:
    async with pair(scale_out=scale_out) as there:
        there.decode_server.switches.pull_fails = True
        request = await there.request_with_ticket(group())
        assert await tokens_of(there.decode, request) == seeded(4)
        assert there.figures.pull_fallbacks == {"late": 0, "failed": 1}
        there.network.expire()


async def test_a_pull_that_hangs_is_abandoned_after_the_time_out(scale_out: bool) -> None:
    async with pair(scale_out=scale_out, leader_timeout_s=0.05) as there:
        there.decode_server.switches.pull_hangs = True
        request = await there.request_with_ticket(group())
        assert await tokens_of(there.decode, request) == seeded(4)
        assert there.figures.pull_fallbacks == {"late": 1, "failed": 0}


async def test_a_ticket_that_is_released_frees_the_prefill_servers_blocks(scale_out: bool) -> None:
    async with pair(scale_out=scale_out) as there:
        request = await there.request_with_ticket(group())
        assert request.ticket is not None
        await there.decode.release(request.ticket)
        assert (there.held, there.network.transfers) == ([Held.REJECTED], 0)
        assert there.figures.tickets_unused == {"released": 1, "left": 0}


async def test_a_stopped_choice_ends_on_the_server_and_the_others_continue(scale_out: bool) -> None:
    async with pair(scale_out=scale_out, stepped=True) as there:
        stream = there.decode.generate(group(stops=True))
        await there.decode_server.until(lambda: there.decode_server.open == 4)
        there.decode_server.step()
        await anext(stream)
        await there.decode.stop_choice(RequestId("g"), 2)
        await there.decode_server.until(lambda: there.decode_server.open == 3)
        there.decode_server.run()
        finished = {choice.index async for delta in stream for choice in delta.choices if choice.finish}
        assert finished == {0, 1, 3}


async def test_a_reader_that_leaves_ends_all_requests_on_the_server(scale_out: bool) -> None:
    async with pair(scale_out=scale_out, stepped=True) as there:
        stream = there.decode.generate(group(stops=True))
        await there.decode_server.until(lambda: there.decode_server.open == 4)
        await stream.aclose()
        await there.decode_server.until(lambda: there.decode_server.open == 0)
        assert there.decode_server.counters.aborted == 4


async def test_a_cancelled_prefill_ends_on_the_server(scale_out: bool) -> None:
    async with pair(scale_out=scale_out, stepped=True) as there:
        prefilling = asyncio.ensure_future(there.decode.prefill(group()))
        await there.decode_server.until(lambda: there.decode_server.open == 1)
        prefilling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefilling
        await there.decode_server.until(lambda: there.decode_server.open == 0)


async def test_a_server_that_dies_in_mid_answer_ends_the_group_with_an_error(scale_out: bool) -> None:
    async with pair(scale_out=scale_out, stepped=True) as there:
        stream = there.decode.generate(group())
        await there.decode_server.until(lambda: there.decode_server.open == 1)
        there.decode_server.step()
        await anext(stream)
        await there.decode_server.kill()
        with pytest.raises(EngineDiedError):
            await anext(stream)
        await there.decode_server.start()
