"""What a `Routed` learns about its workers from what it gives them."""

import asyncio

import msgspec
import pytest

from motet.engines.base import WorkerState
from motet.routing.fleet import Fleet
from motet.routing.load import Load
from motet.routing.routed import Routed
from motet.types import ChoiceStart, SamplingParams
from tests.routing.cell import ANY_MODEL, Cell, Hold, Pair, group, worker

pytestmark = pytest.mark.anyio


async def test_a_group_with_a_ticket_is_nothing_to_read() -> None:
    pair = Pair("decode")
    ticket = await pair.first.prefill(group())
    stream = pair.engine.generate(group(n=1, ticket=ticket))
    pair.engine.generate(group("other", n=2))
    assert pair.engine.generate_load(group()).waiting_tokens == 0
    await stream.aclose()
    await pair.engine.close()


async def test_the_books_measure_how_fast_each_side_reads() -> None:
    hold = Hold()
    pair = Pair(first=hold)
    call = asyncio.ensure_future(pair.engine.prefill(group(prompt_tokens=301)))
    await hold.entered.wait()
    pair.now_s += 2
    hold.go.set()
    await pair.engine.release(await call)
    load = pair.engine.prefill_load(group())
    assert load is not None
    assert load.tokens_per_s == 150  # all but the last token in 2 s

    pair = Pair("decode")
    stream = pair.engine.generate(group(prompt_tokens=300))
    pair.now_s += 3
    await anext(stream)
    await stream.aclose()
    assert pair.engine.generate_load(group()).tokens_per_s == 100


async def test_there_is_no_prefill_load_while_no_prefill_worker_is_up() -> None:
    alike = Pair("decode")
    assert not alike.engine.has_prefill(ANY_MODEL)
    assert alike.engine.prefill_load(group()) is None
    apart = Cell()
    assert apart.routed.prefill_load(group()) == Load(200)
    apart.fleet.mark("prefill-0", WorkerState.DEAD)
    assert apart.routed.has_prefill(ANY_MODEL)
    assert apart.routed.prefill_load(group()) is None


async def test_the_books_count_choices_trunk_blocks_once_and_the_blocks_of_what_was_written() -> None:
    gate = asyncio.Semaphore(40)
    one, _ = worker("decode-0", gate=gate)
    fleet = Fleet([one])
    routed, books = Routed(fleet), fleet.members[0].books

    def count() -> tuple[int, int, int]:
        return books.open_choices, books.trunk_blocks, books.tail_blocks

    request = msgspec.structs.replace(
        group(prompt_tokens=33, n=2),
        choices=(ChoiceStart(0, 7, (1,) * 15), ChoiceStart(1, 8)),
        sampling=SamplingParams(max_tokens=100, ignore_eos=True),
    )
    stream = routed.generate(request)
    assert count() == (2, 3, 2)  # 33 tokens are 3 blocks of 16; each choice has begun its first
    await anext(stream)
    assert count() == (2, 3, 4)  # the longest choice has written 16
    for _ in range(16):
        await anext(stream)
    assert count() == (2, 3, 6)
    await routed.stop_choice(request.request_id, 0)
    await routed.stop_choice(request.request_id, 0)
    assert count() == (1, 3, 3)
    await stream.aclose()
    assert count() == (0, 0, 0)
    routed.check()
