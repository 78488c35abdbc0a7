"""Several streams read as one: order, end, errors, back-pressure and closing."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count

import pytest

from motet.merge import BATCH, Merge, PromptOnce, Source, Take, deliver, in_batches
from motet.types import PromptReport
from tests.clock import TurnCounter, turn
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class BrokenError(Exception):
    pass


def items(*values: object, every: int = 0, error: Exception | None = None) -> Source[object]:
    """Returns a source of these items, with turns of the event loop in between, that ends with `error`."""

    async def run(take: Take[object]) -> None:
        for value in values:
            if (taking := take((value,))) is not None:
                await taking
            await turn(every)
        if error is not None:
            raise error

    return run


class Endless:
    """A source that counts its items and notices its end."""

    def __init__(self, pause: int = 0) -> None:
        self.num_delivered = 0
        self.ended = False
        self._pause = pause

    async def run(self, take: Take[object]) -> None:
        try:
            for number in count():
                taking = take((number,))
                self.num_delivered += 1
                if taking is not None:
                    await taking
                await turn(self._pause)
        finally:
            self.ended = True


async def read_all(merge: Merge[object]) -> list[object]:
    return [item async for item in merge]


@pytest.mark.parametrize("every", [(0, 0), (1, 2), (3, 0)])
@pytest.mark.parametrize("capacity", [1, 2, 100])
async def test_each_source_keeps_its_order_and_nothing_is_lost(every: tuple[int, int], capacity: int) -> None:
    merge = Merge[object](capacity)
    merge.add(items(*range(10), every=every[0]))
    merge.add(items(*range(100, 107), every=every[1]))
    read = await read_all(merge)
    assert [item for item in read if int(str(item)) < 100] == [*range(10)]
    assert [item for item in read if int(str(item)) >= 100] == [*range(100, 107)]


async def test_a_slow_source_does_not_hold_up_a_fast_one() -> None:
    merge = Merge[object](10)
    merge.add(items("slow", "slow", every=100))
    merge.add(items("fast", "fast", every=1))
    assert [await anext(merge) for _ in range(3)] == ["slow", "fast", "fast"]
    await merge.aclose()


async def test_a_merge_without_sources_is_at_its_end_until_one_is_added() -> None:
    merge = Merge[object](1)
    assert await read_all(merge) == []
    assert await merge.read() == []
    merge.add(items("a"))
    assert await read_all(merge) == ["a"]
    merge.add(items("b"))
    assert await merge.read() == ["b"]
    assert await merge.read() == []


async def test_a_source_can_be_added_while_the_reader_waits() -> None:
    merge = Merge[object](1)
    merge.add(items("a", every=5))
    reading = asyncio.create_task(read_all(merge))
    await turn(2)
    merge.add(items("b"))
    assert sorted(map(str, await reading)) == ["a", "b"]


async def test_deliver_reads_an_iterator_to_its_end() -> None:
    async def letters() -> AsyncIterator[object]:
        for letter in "abc":
            yield letter

    merge = Merge[object](1)
    merge.add(partial(deliver, letters()))
    assert await read_all(merge) == ["a", "b", "c"]


async def test_an_error_comes_after_the_items_before_it_and_ends_the_merge() -> None:
    merge = Merge[object](10)
    merge.add(items("a", "b", error=BrokenError("first")))
    await turn(3)
    merge.add(items("dropped"))
    await turn(3)
    assert await merge.read() == ["a", "b"]
    for _ in range(2):
        with pytest.raises(BrokenError, match="first"):
            await merge.read()
        with pytest.raises(BrokenError, match="first"):
            await anext(merge)
    await merge.aclose()


async def test_the_first_error_is_raised_while_the_reader_waits_and_others_are_held() -> None:
    merge = Merge[object](10)
    other = Endless(pause=1)
    merge.add(items(every=3, error=None))
    merge.add(items("a", every=3, error=BrokenError("first")))
    merge.add(items("b", every=6, error=BrokenError("second")))
    merge.add(other.run)
    with pytest.raises(BrokenError, match="first"):
        while True:
            await merge.read()
    delivered = other.num_delivered
    await turn(10)
    assert other.num_delivered <= delivered + 1
    assert not other.ended
    await merge.aclose()
    assert other.ended


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_a_slow_reader_holds_the_sources_back(num_sources: int) -> None:
    sources = [Endless() for _ in range(num_sources)]
    merge = Merge[object](4)
    for source in sources:
        merge.add(source.run)
    await turn(20)
    assert sum(source.num_delivered for source in sources) == 4 + num_sources
    for num_read in range(1, 10):
        await anext(merge)
        await turn(20)
        assert sum(source.num_delivered for source in sources) == 4 + num_sources + num_read
    assert {source.num_delivered - 9 // num_sources for source in sources} <= {1, 5}, "the sources take turns"
    await merge.aclose()


async def test_ready_items_are_handed_over_together_up_to_a_limit() -> None:
    merge = Merge[object](100)
    merge.add(items(*range(7)))
    await turn(2)
    assert await merge.read(5) == [0, 1, 2, 3, 4]
    assert await merge.read(5) == [5, 6]
    merge.put_nowait(["a", "b"])
    assert await merge.read() == ["a", "b"]


async def test_other_tasks_run_while_many_sources_have_items_ready() -> None:
    num_sources = 20 * BATCH
    merge = Merge[object](2 * num_sources)
    for _ in range(num_sources):
        merge.add(items(*range(10)))
    sizes = []
    with TurnCounter() as other:
        while read := await merge.read(BATCH):
            sizes.append(len(read))
    assert sum(sizes) == 10 * num_sources
    assert max(sizes) <= BATCH
    assert other.turns >= len(sizes)


@pytest.mark.parametrize("num_turns", range(8))
async def test_closing_at_any_moment_ends_every_source_and_the_reader(num_turns: int) -> None:
    sources = [Endless(pause) for pause in (0, 1, 2)]
    merge = Merge[object](2)
    tasks = [merge.add(source.run) for source in sources]
    reading = asyncio.create_task(read_all(merge)) if num_turns % 2 else None
    await turn(num_turns)
    await merge.aclose()
    assert all(task.done() for task in tasks)
    assert all(source.ended for source, task in zip(sources, tasks, strict=True) if source.num_delivered)
    if reading is not None:
        await asyncio.wait_for(reading, PATIENCE_S)
    assert await merge.read() == []
    await merge.aclose()


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_reader_that_is_cancelled_at_any_moment_loses_nothing(num_turns: int) -> None:
    merge = Merge[object](1)
    merge.add(items(*range(5), every=2))
    first: list[object] = []

    async def read() -> None:
        nonlocal first
        async for item in merge:
            first += [item]

    reading = asyncio.create_task(read())
    await turn(num_turns)
    reading.cancel()
    await asyncio.wait([reading])
    assert first + await read_all(merge) == [*range(5)]


async def test_closing_waits_for_sources_that_take_their_time_to_end() -> None:
    ended = False

    async def run(take: Take[object]) -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await turn(10)
            ended = True

    merge = Merge[object](1)
    merge.add(run)
    await turn(1)
    await merge.aclose()
    assert ended


async def test_a_source_that_is_cancelled_ends_alone() -> None:
    merge = Merge[object](10)
    task = merge.add(Endless(pause=1).run)
    merge.add(items("a", "b", every=3))
    await turn(2)
    task.cancel()
    await turn(2)
    assert [item for item in await read_all(merge) if isinstance(item, str)] == ["a", "b"]


async def test_failing_drops_unread_items_and_cancels_the_sources_at_once() -> None:
    source = Endless()
    merge = Merge[object](3)
    task = merge.add(source.run)
    await turn(3)
    merge.fail(BrokenError("lost"))
    merge.fail(BrokenError("again"))
    merge.put_nowait(["late"])
    with pytest.raises(BrokenError, match="lost"):
        await merge.read()
    await turn(2)
    assert task.cancelled() and source.ended
    await merge.aclose()
    with pytest.raises(BrokenError, match="lost"):
        await anext(merge)


@pytest.mark.parametrize("error", [None, BrokenError("gone")])
async def test_the_owner_acts_before_the_reader_gets_the_end(error: Exception | None) -> None:
    log: list[str] = []

    async def on_end() -> None:
        await turn(2)
        log.append("on_end")

    merge = Merge[object](1, on_end=on_end)
    merge.add(items("a", error=error))
    try:
        async for item in merge:
            log += [str(item)]
    except BrokenError:
        assert error is not None
    log.append("end")
    assert log == ["a", "on_end", "end"]


async def test_items_are_processed_in_batches_with_a_turn_of_the_loop_after_each() -> None:
    with TurnCounter() as other:
        turns_before = [other.turns async for _ in in_batches(range(3 * BATCH))]
    assert turns_before == [number // BATCH for number in range(3 * BATCH)]


@pytest.mark.parametrize("before", [(), (None,)])
async def test_a_report_on_the_prompt_is_passed_on_once(before: Sequence[None]) -> None:
    prompt, report = PromptOnce(), PromptReport(cached_tokens=3)
    assert [prompt.first(missing) for missing in before] == [*before]
    assert prompt.first(report) is report
    assert prompt.first(PromptReport(cached_tokens=0)) is None


def test_the_first_report_on_a_prompt_says_how_routing_has_treated_the_group() -> None:
    once, report = PromptOnce(), PromptReport(3)
    assert once.first(report) is report
    assert once.first(report) is None
    once = PromptOnce()
    once.prefill_worker, once.queue_s = "prefill-0", 0.5
    inner = PromptReport(3, prefill_worker="of the worker", queue_s=0.25)
    assert once.first(inner) == PromptReport(3, prefill_worker="prefill-0", queue_s=0.75)
