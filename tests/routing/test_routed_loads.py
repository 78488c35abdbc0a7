"""What a `Routed` learns about its workers from what it gives them."""

import asyncio

import pytest

from tests.routing.cell import Hold, Pair, group

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
    assert pair.engine.prefill_load(group()).tokens_per_s == 150  # all but the last token in 2 s

    pair = Pair("decode")
    stream = pair.engine.generate(group(prompt_tokens=300))
    pair.now_s += 3
    await anext(stream)
    await stream.aclose()
    assert pair.engine.generate_load(group()).tokens_per_s == 100
