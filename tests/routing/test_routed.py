"""Several workers of one role as one engine."""

import asyncio

import msgspec
import pytest

from motet.engines.fake import fake_info
from motet.errors import EngineClosedError, EngineDiedError, EngineError, MotetError, OverloadedError, RequestError
from motet.routing.routed import Routed
from motet.transfer.ticket import TransferAddress
from tests.routing.cell import Hold, Pair, answer, answers_of, group, tokens_of, worker

pytestmark = pytest.mark.anyio


def failing(error: MotetError) -> Hold:
    return Hold(error=error, held=False)


async def test_prefill_goes_where_the_fewest_prompt_tokens_wait() -> None:
    first, second = Hold(), Hold()
    pair = Pair(first=first, second=second)
    calls = [asyncio.ensure_future(pair.engine.prefill(group("long", prompt_tokens=500)))]
    await first.entered.wait()
    calls.append(asyncio.ensure_future(pair.engine.prefill(group("short", prompt_tokens=100))))
    await second.entered.wait()
    second.entered.clear()
    calls.append(asyncio.ensure_future(pair.engine.prefill(group("next", prompt_tokens=100))))
    await second.entered.wait()
    assert pair.prefills == (1, 2)
    first.go.set()
    second.go.set()
    for ticket in await asyncio.gather(*calls):
        await pair.engine.release(ticket)
    pair.check()


async def test_a_group_goes_where_the_fewest_choices_are_open() -> None:
    pair = Pair("decode")
    many = pair.engine.generate(group("many", n=8))
    few = [pair.engine.generate(group(name, n=2)) for name in "abc"]
    assert pair.groups == (1, 3)
    last = pair.engine.generate(group("last", n=1))
    assert pair.groups == (1, 4)
    assert pair.engine.generate_load(group()).waiting_tokens == 4 * 200
    for stream in (many, *few, last):
        await tokens_of(stream)
    pair.check()


async def test_a_choice_that_has_finished_or_was_stopped_is_not_open_any_more() -> None:
    pair = Pair("decode")
    first = pair.engine.generate(group("first", n=2))
    second = pair.engine.generate(group("second", n=2))
    await pair.engine.stop_choice(group("first").request_id, 1)
    pair.engine.generate(group("third", n=1))
    assert pair.groups == (2, 1)
    assert await tokens_of(first) == {0: answer(0)}
    assert await tokens_of(second) == {0: answer(0), 1: answer(1)}
    await pair.engine.stop_choice(group("unknown").request_id, 0)
    await pair.engine.close()


async def test_a_choice_is_stopped_where_its_group_is() -> None:
    pair = Pair("decode")
    streams = {name: pair.engine.generate(group(name, n=2)) for name in ("first", "second")}
    await pair.engine.stop_choice(group("second").request_id, 0)
    assert await tokens_of(streams["first"]) == {0: answer(0), 1: answer(1)}
    assert await tokens_of(streams["second"]) == {1: answer(1)}
    pair.check()


async def test_a_group_that_is_closed_early_leaves_the_books() -> None:
    pair = Pair("decode")
    for _ in range(2):
        stream = pair.engine.generate(group(n=3))
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
    await pair.engine.generate(group("unread")).aclose()
    assert pair.groups == (3, 0)
    pair.check()


@pytest.mark.parametrize("error", [EngineDiedError("gone"), OverloadedError("full")])
async def test_where_a_prefill_worker_cannot_the_next_one_is_asked_in_the_same_call(error: MotetError) -> None:
    pair = Pair(first=failing(error))
    ticket = await pair.engine.prefill(group())
    assert ticket.remote_engine_id == "engine-of-prefill-1"
    assert pair.prefills == (1, 1)
    await pair.engine.release(ticket)
    pair.check()


async def test_a_prefill_worker_that_died_is_tried_again_after_a_second() -> None:
    hold = failing(EngineDiedError("gone"))
    pair = Pair(first=hold)
    for now_s, prefills in [(0.0, (1, 1)), (0.9, (1, 2)), (1.0, (2, 3)), (1.9, (2, 4))]:
        pair.now_s = now_s
        await pair.engine.release(await pair.engine.prefill(group()))
        assert pair.prefills == prefills
    hold.error = None
    pair.now_s = 2.0
    await pair.engine.release(await pair.engine.prefill(group()))
    assert pair.prefills == (3, 4)
    pair.check()


async def test_one_that_takes_no_more_is_asked_again_with_the_next_prompt() -> None:
    pair = Pair(first=failing(OverloadedError("full")))
    for prefills in [(1, 1), (2, 2)]:
        await pair.engine.release(await pair.engine.prefill(group()))
        assert pair.prefills == prefills


@pytest.mark.parametrize("error", [RequestError("never"), EngineError("sick")])
async def test_an_error_of_the_group_is_not_taken_to_another_worker(error: MotetError) -> None:
    pair = Pair(first=failing(error))
    with pytest.raises(type(error)):
        await pair.engine.prefill(group())
    assert pair.prefills == (1, 0)
    pair.check()


async def test_when_no_prefill_worker_is_left_the_last_one_says_why_and_then_all_are_down() -> None:
    first, second = (failing(EngineDiedError(f"worker {i} is gone")) for i in range(2))
    pair = Pair(first=first, second=second)
    with pytest.raises(EngineDiedError, match="worker 1 is gone"):
        await pair.engine.prefill(group())
    with pytest.raises(EngineDiedError, match="no worker is up: prefill-0, prefill-1"):
        await pair.engine.prefill(group())
    assert pair.prefills == (1, 1)
    pair.check()


async def test_when_one_is_full_and_one_dead_it_is_for_want_of_room() -> None:
    pair = Pair(first=failing(OverloadedError("full")), second=failing(EngineDiedError("gone")))
    with pytest.raises(OverloadedError):
        await pair.engine.prefill(group())


async def test_a_group_whose_worker_dies_is_not_begun_again_and_the_worker_gets_no_more() -> None:
    pair = Pair("decode")
    pair.first.fail_after = {1: EngineDiedError("gone")}
    stream = pair.engine.generate(group("a"))
    await anext(stream)
    with pytest.raises(EngineDiedError):
        await anext(stream)
    pair.now_s = 1000.0
    for name in ("b", "c"):
        await answers_of(pair.engine, group(name))
    assert pair.groups == (1, 2)
    pair.check()


async def test_a_worker_that_gives_its_figures_again_gets_groups_again() -> None:
    pair = Pair("decode")
    pair.first.fail_after = {0: EngineDiedError("gone")}
    with pytest.raises(EngineDiedError):
        await answers_of(pair.engine, group("a"))
    pair.first.fail_after = {}
    await pair.engine.stats()
    await answers_of(pair.engine, group("b"))
    assert pair.groups == (2, 0)


async def test_with_all_workers_dead_one_of_them_says_so() -> None:
    one, engine = worker("decode-0", fail_after={0: EngineDiedError("worker 0 is gone")})
    routed = Routed([one])
    for name in ("a", "b"):
        with pytest.raises(EngineDiedError, match="worker 0 is gone"):
            await answers_of(routed, group(name))
    engine.check()
    routed.check()


async def test_a_ticket_is_given_back_to_the_worker_that_holds_the_lease() -> None:
    pair = Pair()
    ticket = await pair.second.prefill(group())
    await pair.engine.release(ticket)
    assert (pair.first.released, pair.second.released) == ([], [ticket])
    pair.check()


async def test_a_ticket_of_nobody_here_is_given_back_through_any_worker() -> None:
    pair = Pair()
    stranger = msgspec.structs.replace(await pair.first.prefill(group()), remote_engine_id="elsewhere")
    await pair.engine.release(stranger)
    assert pair.first.released == [stranger]
    pair.check()


async def test_cached_tokens_are_those_of_the_worker_that_would_get_the_group() -> None:
    pair = Pair("decode")
    pair.second.cached.append(group().prompt[:64])
    assert pair.engine.cached_tokens(group()) == 0
    stream = pair.engine.generate(group("first"))
    assert pair.engine.cached_tokens(group()) == 64
    assert pair.engine.generate_load(group(prompt_tokens=200)).own_tokens == 136
    await stream.aclose()
    pair.check()


async def test_figures_are_summed_over_those_that_live() -> None:
    pair = Pair("decode")
    for name in ("a", "b"):
        pair.engine.generate(group(name, prompt_tokens=10))
    assert (await pair.engine.stats()).prompt_tokens == 20
    pair.first.dead = True
    assert (await pair.engine.stats()).prompt_tokens == 10
    pair.second.dead = True
    with pytest.raises(EngineDiedError, match="no worker is up: decode-0, decode-1"):
        await pair.engine.stats()
    await pair.engine.close()


async def test_info_of_one_worker_is_its_own() -> None:
    one, engine = worker("decode-0")
    assert Routed([one]).info is engine.info


async def test_info_of_several_is_what_holds_on_any_of_them() -> None:
    pair = Pair("decode")
    address = TransferAddress("x", "127.0.0.1", 1)
    base = msgspec.structs.replace(fake_info(transfer=address), pid=1)
    pair.first.info = msgspec.structs.replace(base, max_model_len=100, num_blocks=9, max_num_seqs=4)
    pair.second.info = msgspec.structs.replace(base, max_model_len=200, num_blocks=7, max_num_seqs=2)
    assert pair.engine.info == msgspec.structs.replace(
        base, max_model_len=100, num_blocks=7, max_num_seqs=2, pid=None, transfer=None
    )
    pair.second.info = msgspec.structs.replace(base, fingerprint="other-same")
    assert pair.engine.info.fingerprint == "mixed"


async def test_closing_closes_the_workers_and_ends_their_groups() -> None:
    pair = Pair("decode")
    stream = pair.engine.generate(group())
    await pair.engine.close()
    with pytest.raises(EngineClosedError):
        await anext(stream)
    assert pair.first.closed
    assert pair.second.closed
    await pair.engine.close()
    pair.check()


async def test_a_prefill_that_is_cancelled_leaves_the_books() -> None:
    hold = Hold()
    pair = Pair(first=hold)
    call = asyncio.ensure_future(pair.engine.prefill(group()))
    await hold.entered.wait()
    call.cancel()
    await asyncio.wait([call])
    pair.check()
