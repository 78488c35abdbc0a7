"""The loads of workers: what a router learns about them from the groups that it assigns to them."""

import asyncio
from typing import NamedTuple

import msgspec
import pytest

from motet.engine import Worker, WorkerState
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.serving import WorkKind
from motet.routing.workers.worker_load import PromptBacklog
from motet.testing.fake_engine import FakeLeases, fake_info
from motet.types import ChoiceDelta, ChoiceStart, GenerateRequest, GroupDelta, SamplingParams
from tests.routing.cells import CellScene, PairScene
from tests.routing.scene import ONE_LIFE, ControlledEngine, ControlledPrefill, backlog_of, group, script, worker

pytestmark = pytest.mark.anyio


async def test_a_group_with_a_ticket_adds_no_prompt_tokens() -> None:
    pair = PairScene("decode")
    ticket = await pair.first.prefill(group())
    stream = pair.router.generate(group(n=1, ticket=ticket))
    other = pair.router.generate(group("other", n=2))
    assert backlog_of(pair, WorkKind.GENERATE).waiting_tokens == 0
    await stream.aclose()
    await other.aclose()


async def test_the_load_measures_the_speed_at_which_each_side_computes_prompts() -> None:
    controlled = ControlledPrefill()
    pair = PairScene(first=controlled)
    call = asyncio.ensure_future(pair.router.prefill(group(prompt_tokens=301)))
    await controlled.entered.wait()
    pair.clock.now_s += 2
    controlled.may_end.set()
    await pair.router.release(await call)
    backlog = pair.router.dispatcher.chooser.backlog(WorkKind.PREFILL, group())
    assert backlog is not None
    assert backlog.tokens_per_s == 150  # all but the last token in 2 s

    pair = PairScene("decode")
    stream = pair.router.generate(group(prompt_tokens=300))
    pair.clock.now_s += 3
    await anext(stream)
    await stream.aclose()
    assert backlog_of(pair, WorkKind.GENERATE).tokens_per_s == 100


async def test_there_is_no_prefill_backlog_while_no_prefill_worker_is_available() -> None:
    alike = PairScene("decode")
    assert not alike.fleet.catalog.serving().has_prefill
    assert alike.router.dispatcher.chooser.backlog(WorkKind.PREFILL, group()) is None
    apart = CellScene()
    assert apart.router.dispatcher.chooser.backlog(WorkKind.PREFILL, group()) == PromptBacklog(200)
    apart.fleet.mark("prefill-0", WorkerState.DEAD)
    assert apart.fleet.catalog.serving().has_prefill
    assert apart.router.dispatcher.chooser.backlog(WorkKind.PREFILL, group()) is None


class LoadCounts(NamedTuple):
    choices: int
    trunk_blocks: int
    tail_blocks: int


async def test_the_load_counts_choices_each_trunk_block_once_and_all_tail_blocks() -> None:
    gate = asyncio.Semaphore(40)
    one, engine = worker("decode-0", gate=gate)
    engine.scenario.script = lambda _, __: [1]
    fleet = Fleet([one])
    router, load = Router(fleet, ONE_LIFE), fleet.members[0].load

    def count() -> LoadCounts:
        return LoadCounts(load.open_choices, load.trunk_blocks, load.tail_blocks)

    request = msgspec.structs.replace(
        group(prompt_tokens=33, n=2),
        choices=(ChoiceStart(0, 7, (1,) * 15), ChoiceStart(1, 8)),
        sampling=SamplingParams(max_tokens=100, ignore_eos=True),
    )
    stream = router.generate(request)
    # 33 tokens are 3 blocks of 16, and each choice has its first tail block
    assert count() == LoadCounts(choices=2, trunk_blocks=3, tail_blocks=2)
    await anext(stream)
    # the first choice has 16 output tokens, and needs a second tail block
    assert count() == LoadCounts(choices=2, trunk_blocks=3, tail_blocks=3)
    for _ in range(16):
        await anext(stream)
    assert count() == LoadCounts(choices=2, trunk_blocks=3, tail_blocks=5)  # 32 and 17 tokens
    await router.stop_choice(request.request_id, 0)
    await router.stop_choice(request.request_id, 0)
    assert count() == LoadCounts(choices=1, trunk_blocks=3, tail_blocks=2)
    await stream.aclose()
    assert count() == LoadCounts(choices=0, trunk_blocks=0, tail_blocks=0)
    router.check()


class Chunks:
    """A stream with many tokens of a choice in one delta, as a vLLM server can send."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request

    def __aiter__(self) -> "Chunks":
        return self

    async def __anext__(self) -> GroupDelta:
        choices = tuple(ChoiceDelta(start.index, (1,) * 40 * (start.index + 1)) for start in self._request.choices)
        return GroupDelta(self._request.request_id, choices)

    async def aclose(self) -> None:
        """Does nothing: no block is held."""


class ChunkEngine(ControlledEngine):
    def generate(self, request: GenerateRequest) -> Chunks:  # type: ignore[override]  # another stream
        return Chunks(request)


async def test_tail_blocks_are_counted_by_tokens_and_not_by_deltas() -> None:
    """A delta with 40 tokens used to count as one, so groups were placed where there was no capacity."""
    engine = ChunkEngine(script, info=fake_info(), leases=FakeLeases())
    fleet = Fleet([Worker("both-0", engine, "")])
    router, load = Router(fleet, ONE_LIFE), fleet.members[0].load
    stream = router.generate(group(prompt_tokens=33, n=2))
    assert load.tail_blocks == 2
    await anext(stream)
    assert load.tail_blocks == 3 + 6  # 40 and 80 tokens in blocks of 16: a full block already needs the next one
    await anext(stream)
    assert load.tail_blocks == 6 + 11
    await stream.aclose()
    assert load.tail_blocks == 0
    router.check()
