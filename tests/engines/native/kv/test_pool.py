"""Blocks, names and free runs, with literal ids and running counts in comments."""

from typing import NamedTuple

import pytest

from motet.block_names import block_names
from motet.engines.native.kv.pool import BlockPool, FreeRuns, OutOfBlocksError
from motet.kv_events.changes import Removed, Stored

A, B, C, D = block_names(range(16), 4, salt="")


class PoolCounts(NamedTuple):
    """Numbers of blocks. Idle blocks are free, too."""

    free: int
    idle: int
    held: int


def counts(pool: BlockPool) -> PoolCounts:
    pool.check()
    return PoolCounts(free=pool.num_free, idle=pool.num_idle, held=pool.num_held)


def content(names: list[bytes]) -> Stored:
    """Returns blocks with these names, each with the same four tokens."""
    return Stored(tuple(names), None, (1, 2, 3, 4) * len(names))


def idle(pool: BlockPool, *names: bytes) -> list[int]:
    """Makes idle blocks with these names."""
    pool.publish(blocks := pool.take(len(names)), content(list(names)))
    pool.release(blocks)
    return blocks


def test_a_block_is_free_again_only_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(10)
    trunk = pool.take(3)
    assert trunk == [0, 1, 2]
    pool.share(trunk)
    assert pool.holders() == {0: 2, 1: 2, 2: 2}
    pool.release(trunk)
    assert counts(pool) == PoolCounts(free=7, idle=0, held=3)
    pool.release(trunk)
    assert counts(pool) == PoolCounts(free=10, idle=0, held=0)


def test_either_all_requested_blocks_are_taken_or_none() -> None:
    pool = BlockPool(4)
    pool.take(3)
    with pytest.raises(OutOfBlocksError, match="2 blocks are needed, 1 of 4 are free"):
        pool.take(2)
    assert counts(pool) == PoolCounts(free=1, idle=0, held=3)


def test_a_released_block_is_idle_if_it_has_a_name_and_free_otherwise() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.publish([blocks[0]], content([A]))
    pool.release(blocks)
    assert counts(pool) == PoolCounts(free=4, idle=1, held=0)
    assert pool.find([A]) == [0]


def test_sharing_an_idle_block_takes_it_out_of_the_free_count() -> None:
    pool = BlockPool(4)
    blocks = idle(pool, A, B)  # 4 free, 2 of them idle
    pool.share(blocks)
    assert counts(pool) == PoolCounts(free=2, idle=0, held=2)
    assert pool.take(2) == [2, 3]
    with pytest.raises(OutOfBlocksError):
        pool.take(1)  # a held block is never evicted, named or not


def test_find_stops_at_the_first_unknown_name() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.publish([blocks[0], blocks[2]], content([A, C]))
    assert pool.find([A, B, C]) == [0]
    assert pool.find([B]) == []
    pool.publish([blocks[1]], content([B]))
    assert pool.find([A, B, C, D]) == [0, 1, 2]


def test_a_second_block_with_the_same_name_stays_unnamed() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.publish([first], content([A]))
    pool.publish([second], content([A]))
    assert pool.find([A]) == [first]
    pool.release([second])
    assert counts(pool) == PoolCounts(free=3, idle=0, held=1)  # free and not idle: it cannot be found
    pool.release([first])
    assert counts(pool) == PoolCounts(free=4, idle=1, held=0)


def test_a_block_keeps_its_first_name() -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.publish([block], content([A]))
    pool.publish([block], content([B]))
    assert pool.find([A]) == [block]
    assert pool.find([B]) == []
    pool.check()


def test_later_blocks_of_a_prefix_are_evicted_first() -> None:
    pool = BlockPool(4)
    idle(pool, A, B, C, D)
    assert pool.take(1) == [3]
    assert pool.find([A, B, C, D]) == [0, 1, 2]
    assert pool.take(1) == [2]
    assert pool.find([A, B, C, D]) == [0, 1]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    pool.publish(one := pool.take(2), content([A, B]))
    other_names = block_names(range(100, 108), 4, salt="")
    pool.publish(other := pool.take(2), content(other_names))
    pool.release(one)
    pool.release(other)
    pool.share(one)  # used again, so that `other` is now the older one
    pool.release(one)
    assert sorted(pool.take(2)) == other
    assert pool.find(other_names) == []
    assert pool.find([A, B]) == one


def test_free_blocks_are_taken_before_idle_ones() -> None:
    pool = BlockPool(4)
    idle(pool, A, B)
    assert pool.take(2) == [2, 3]
    assert counts(pool) == PoolCounts(free=2, idle=2, held=2)
    assert pool.find([A, B]) == [0, 1]


def test_an_evicted_block_can_get_another_name() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.publish([block], content([A]))
    pool.release([block])
    assert pool.take(1) == [block]
    pool.publish([block], content([B]))
    assert pool.find([A]) == []
    assert pool.find([B]) == [block]
    pool.check()


def test_evicted_blocks_join_the_runs_next_to_them() -> None:
    pool = BlockPool(8)
    idle(pool, A, B, C, D)  # 0..3 idle, 4..7 free
    assert pool.take(6) == [2, 3, 4, 5, 6, 7]


def test_a_block_is_taken_right_after_the_last_one_if_that_is_free() -> None:
    pool = BlockPool(8)
    one, other = pool.take(2), pool.take(1)  # 0, 1 and 2
    pool.release(one)
    assert pool.take(1, after=other[-1]) == [3]
    assert pool.take(1) in ([0], [1])


def test_releasing_or_naming_a_block_that_is_not_held_is_an_error() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="block 2 is not held"):
        pool.release([2])
    with pytest.raises(ValueError, match="block 2 is not held"):
        pool.publish([2], content([A]))
    with pytest.raises(KeyError):
        pool.share([2])
    assert counts(pool) == PoolCounts(free=4, idle=0, held=0)


def test_followers_know_a_block_that_was_evicted_and_stored_again_in_one_step() -> None:
    pool = BlockPool(1)
    for _ in range(2):
        pool.publish(block := pool.take(1), content([A]))
        pool.release(block)
    assert pool.take_changes() == [content([A]), Removed((A,)), content([A])]
    pool.take(1)
    assert pool.take_changes() == [Removed((A,))]
    assert pool.take_changes() == []


def test_only_new_blocks_are_published_each_with_its_parent() -> None:
    pool = BlockPool(8)
    pool.publish(pool.take(1), content([A]))
    pool.publish(pool.take(1), content([C]))
    pool.take_changes()
    stored = Stored((A, B, C, D), None, tuple(range(16)))
    pool.publish(pool.take(4), stored)
    assert pool.take_changes() == [Stored((B,), A, (4, 5, 6, 7)), Stored((D,), C, (12, 13, 14, 15))]


def test_evictions_of_one_step_are_published_together() -> None:
    pool = BlockPool(4)
    idle(pool, A, B, C, D)
    pool.take_changes()
    pool.take(1)
    pool.take(2)
    assert pool.take_changes() == [Removed((D, C, B))]


def free_runs(num_blocks: int, *free: int) -> FreeRuns:
    """Returns the free runs in which only `free` are left of `num_blocks`."""
    runs = FreeRuns(num_blocks)
    runs.take(num_blocks)
    for block in free:
        runs.add(block)
    return runs


def test_a_new_set_is_one_run_and_is_taken_from_the_front() -> None:
    runs = FreeRuns(10)
    assert runs.take(3) == [0, 1, 2]
    assert runs.take(2) == [3, 4]
    assert runs.runs() == [(5, 10)]
    assert len(runs) == 5


def test_a_set_of_no_blocks_is_empty() -> None:
    runs = FreeRuns(0)
    assert runs.runs() == []
    assert len(runs) == 0
    assert runs.take(0) == []


def test_a_returned_block_joins_the_runs_on_both_sides() -> None:
    runs = free_runs(10, 2, 3, 5, 6)
    assert runs.runs() == [(2, 4), (5, 7)]
    runs.add(4)
    assert runs.runs() == [(2, 7)]


def test_a_returned_block_joins_only_what_touches_it() -> None:
    runs = free_runs(10, 1, 4)
    runs.add(2)
    runs.add(8)
    assert runs.runs() == [(1, 3), (4, 5), (8, 9)]


def test_the_smallest_run_that_is_long_enough_is_used() -> None:
    runs = free_runs(20, 0, 2, 3, 4, 10, 11, 12, 13, 14)  # runs of 1, 3 and 5
    assert runs.take(2) == [2, 3]
    assert runs.take(1) in ([0], [4])
    assert runs.take(4) == [10, 11, 12, 13]


def test_if_no_run_is_long_enough_the_longest_ones_are_used_up_first() -> None:
    runs = free_runs(20, 0, 2, 3, 4, 10, 11, 12, 13)  # runs of 1, 3 and 4
    assert runs.take(6) == [10, 11, 12, 13, 2, 3]
    assert runs.runs() == [(0, 1), (4, 5)]


def test_the_run_after_the_given_block_wins_over_a_better_fit() -> None:
    runs = free_runs(20, 3, 10, 11, 12, 13)
    assert runs.take(1, after=9) == [10]
    assert runs.take(1, after=10) == [11]


def test_a_run_after_the_given_block_is_not_used_if_it_is_too_short() -> None:
    runs = free_runs(20, 5, 10, 11, 12)
    assert runs.take(2, after=4) == [10, 11]
    assert runs.take(1, after=19) in ([5], [12])
