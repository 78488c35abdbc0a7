"""The dispatcher makes one engine of several workers of a role."""

import msgspec
import pytest

from motet.engine import Worker, WorkerState
from motet.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineSilentError,
    MotetError,
    NoWorkerError,
    OverloadedError,
)
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.serving import WorkKind
from motet.settings.server_config import Policy
from motet.testing.fake_engine import fake_info
from motet.transfer.ticket import TransferAddress
from motet.types import Role
from tests.routing.cells import PairScene, PerWorker
from tests.routing.scene import (
    ONE_LIFE,
    answer,
    answers,
    answers_of,
    backlog_of,
    cache_prefix,
    group,
    tokens_of,
    worker,
)

pytestmark = pytest.mark.anyio


async def test_the_least_loaded_is_the_one_with_the_fewest_open_choices() -> None:
    pair = PairScene("decode", policy=Policy.LEAST_LOADED)
    many = pair.router.generate(group("many", n=8))
    few = [pair.router.generate(group(name, n=2)) for name in "abc"]
    assert pair.groups == PerWorker(first=1, second=3)
    last = pair.router.generate(group("last", n=1))
    assert pair.groups == PerWorker(first=1, second=4)
    assert backlog_of(pair, WorkKind.GENERATE).waiting_tokens == 4 * 200
    for stream in (many, *few, last):
        await tokens_of(stream)


async def test_a_choice_that_has_finished_or_was_stopped_is_not_open_any_more() -> None:
    pair = PairScene("decode")
    first = pair.router.generate(group("first", n=2))
    second = pair.router.generate(group("second", n=2))
    await pair.router.stop_choice(group("first").request_id, 1)
    third = pair.router.generate(group("third", n=1))
    assert pair.groups == PerWorker(first=2, second=1)
    assert await tokens_of(first) == {0: answer(0)}
    assert await tokens_of(second) == answers(2)
    await pair.router.stop_choice(group("unknown").request_id, 0)
    await third.aclose()


async def test_a_choice_is_stopped_where_its_group_is() -> None:
    pair = PairScene("decode")
    streams = {name: pair.router.generate(group(name, n=2)) for name in ("first", "second")}
    await pair.router.stop_choice(group("second").request_id, 0)
    assert await tokens_of(streams["first"]) == answers(2)
    assert await tokens_of(streams["second"]) == {1: answer(1)}


async def test_a_group_that_is_closed_early_is_removed_from_the_load() -> None:
    pair = PairScene("decode")
    for _ in range(2):
        stream = pair.router.generate(group(n=3))
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
    await pair.router.generate(group("unread")).aclose()
    assert pair.groups == PerWorker(first=2, second=1)


async def test_workers_of_equal_cost_take_turns_and_every_choice_has_its_reason() -> None:
    pair = PairScene("decode")
    for name in "abcd":
        await answers_of(pair.router, group(name))
    assert pair.groups == PerWorker(first=2, second=2)
    assert pair.router.counts.decisions == {"cost": 4}
    cache_prefix(pair.fleet, "decode-1", group("e"), 64)
    await answers_of(pair.router, group("e"))
    assert pair.groups == PerWorker(first=2, second=3)
    assert pair.router.counts.decisions == {"cost": 4, "prefix": 1}
    assert (pair.router.counts.routed_tokens, pair.router.counts.overlap_tokens) == (5 * 200, 64)
    assert "decode-1 136 (own 136" in (pair.fleet.reports()[1].last_decision or "")


async def test_the_first_delta_names_the_worker_that_generates() -> None:
    pair = PairScene("decode")
    pair.fleet.mark("decode-0", WorkerState.DRAINING)
    stream = pair.router.generate(group())
    deltas = [delta async for delta in stream]
    assert [delta.worker for delta in deltas] == ["decode-1"] + [""] * (len(deltas) - 1)


@pytest.mark.parametrize(
    ("error", "state"), [(EngineDiedError("gone"), WorkerState.DEAD), (OverloadedError("full"), WorkerState.READY)]
)
async def test_an_engine_that_refuses_a_group_at_once_is_skipped_too(error: MotetError, state: WorkerState) -> None:
    pair = PairScene("decode")
    pair.first.refusal = error
    with pytest.raises(type(error)):
        pair.router.generate(group())
    for name in "abc":
        await answers_of(pair.router, group(name))
    assert pair.groups == PerWorker(first=0, second=3)
    assert pair.fleet.reports()[0].state is state


async def test_a_group_whose_worker_dies_is_not_restarted_and_that_worker_gets_no_more() -> None:
    pair = PairScene("decode")
    pair.first.scenario.fail_after = {1: EngineDiedError("gone")}
    stream = pair.router.generate(group("a"))
    await anext(stream)
    with pytest.raises(EngineDiedError):
        await anext(stream)
    pair.clock.now_s = 1000.0
    for name in ("b", "c"):
        await answers_of(pair.router, group(name))
    assert pair.groups == PerWorker(first=1, second=2)


async def test_a_worker_that_its_keeper_found_silent_stays_silent_when_its_groups_fail() -> None:
    one, _ = worker("decode-0", fail_after={1: EngineSilentError("no heartbeats")})
    fleet = Fleet([one])
    stream = Router(fleet, ONE_LIFE).generate(group("a"))
    await anext(stream)
    fleet.mark("decode-0", WorkerState.SILENT)
    with pytest.raises(EngineSilentError):
        await anext(stream)
    assert fleet.reports()[0].state is WorkerState.SILENT
    fleet.check()


async def test_with_all_workers_dead_every_group_ends_with_that_error() -> None:
    one, engine = worker("decode-0", fail_after={0: EngineDiedError("worker 0 is gone")})
    router = Router(Fleet([one]), ONE_LIFE)
    with pytest.raises(EngineDiedError, match="worker 0 is gone"):
        await answers_of(router, group("a"))
    with pytest.raises(NoWorkerError, match="no worker can generate now: decode-0 is dead"):
        router.generate(group("b"))
    with pytest.raises(NoWorkerError, match="there is none"):
        Router(Fleet()).generate(group("c"))
    engine.check()
    router.check()


async def test_cached_tokens_are_counted_on_the_worker_that_would_get_the_group() -> None:
    pair = PairScene("decode")
    cache_prefix(pair.fleet, "decode-1", group(), 64)
    assert backlog_of(pair, WorkKind.GENERATE).own_tokens == 136
    stream = pair.router.generate(msgspec.structs.replace(group(n=8), prompt=(*group().prompt[:64], *range(136))))
    assert pair.groups == PerWorker(first=0, second=1)
    # The open choices there make the other worker cost less.
    assert backlog_of(pair, WorkKind.GENERATE).own_tokens == 200
    await stream.aclose()
    assert backlog_of(pair, WorkKind.GENERATE).own_tokens == 136


async def test_figures_are_summed_over_living_workers() -> None:
    pair = PairScene("decode")
    streams = [pair.router.generate(group(name, prompt_tokens=10)) for name in ("a", "b")]
    assert (await pair.router.stats()).prompt_tokens == 20
    pair.first.has_no_stats = True
    assert (await pair.router.stats()).prompt_tokens == 10
    pair.second.has_no_stats = True
    with pytest.raises(NoWorkerError, match="no worker can generate now: decode-0 is dead, decode-1 is dead"):
        await pair.router.stats()
    for stream in streams:
        await stream.aclose()


async def test_info_of_one_worker_is_its_own() -> None:
    one, engine = worker("decode-0")
    assert Router(Fleet([one]), role=Role.DECODE).info is engine.info


async def test_while_no_worker_is_available_info_is_the_last_known_one() -> None:
    one, engine = worker("decode-0")
    fleet = Fleet()
    router = Router(fleet, role=Role.DECODE)
    with pytest.raises(NoWorkerError):
        _ = router.info
    fleet.put(one)
    assert router.info is engine.info
    fleet.mark("decode-0", WorkerState.DEAD)
    assert router.info is engine.info


async def test_info_of_several_workers_holds_on_each_of_them() -> None:
    pair = PairScene("decode")
    address = TransferAddress("x", "127.0.0.1", 1)
    base = msgspec.structs.replace(fake_info(role=Role.DECODE, transfer=address), pid=1)
    pair.first.info = msgspec.structs.replace(base, max_model_len=100, num_blocks=9, max_num_seqs=4)
    pair.second.info = msgspec.structs.replace(base, max_model_len=200, num_blocks=7, max_num_seqs=2)
    assert pair.router.info == msgspec.structs.replace(
        base, max_model_len=100, num_blocks=7, max_num_seqs=2, pid=None, transfer=None
    )
    pair.second.info = msgspec.structs.replace(base, fingerprint="other-same")
    pair.fleet.put(Worker("decode-1", pair.second, ""))
    assert pair.router.info.fingerprint == "mixed"


async def test_closing_closes_the_workers_and_ends_their_groups() -> None:
    pair = PairScene("decode")
    stream = pair.router.generate(group())
    await pair.router.close()
    with pytest.raises(EngineClosedError):
        await anext(stream)
    assert pair.first.closed
    assert pair.second.closed
    await pair.router.close()
