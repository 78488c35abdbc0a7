"""The index knows which worker has which prompt blocks."""

from collections.abc import Iterator
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.block_names import BlockName, block_names
from motet.routing.workers.prefix_index import FEW, PrefixIndex

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


@pytest.fixture
def index() -> Iterator[PrefixIndex]:
    index = PrefixIndex()
    yield index
    index.check()


def test_overlap_counts_leading_blocks_and_names_only_workers_with_any(index: PrefixIndex) -> None:
    index.stored("all", [A, B, C])
    index.stored("two", [A, B])
    index.stored("one", [A])
    index.stored("other", [D])
    assert index.overlap([A, B, C, D]) == {"all": 3, "two": 2, "one": 1}
    assert index.overlap([]) == {}


def test_overlap_lists_workers_with_more_blocks_later(index: PrefixIndex) -> None:
    index.stored("all", [A, B, C])
    for number in range(2 * FEW):
        index.stored(f"one-{number}", [A])
    index.stored("two", [A, B])
    counts = list(index.overlap([A, B, C]).values())
    assert counts == [1] * 2 * FEW + [2, 3]


def test_blocks_after_a_missing_one_do_not_count(index: PrefixIndex) -> None:
    index.stored("w", [A, B, C])
    index.removed("w", [B])
    assert index.overlap([A, B, C]) == {"w": 1}
    index.removed("w", [A])
    assert index.overlap([A, B, C]) == {}


def test_names_are_computed_only_as_far_as_some_worker_has_them(index: PrefixIndex) -> None:
    index.stored("w", [A])
    names = iter([A, B, C, D])
    assert index.overlap(names) == {"w": 1}
    assert list(names) == [C, D]


def test_overlap_finds_the_names_of_a_prompt_s_blocks(index: PrefixIndex) -> None:
    index.stored("w", block_names(range(64), 16, salt="salt"))
    assert index.overlap(block_names([*range(40), *range(90, 130)], 16, salt="salt")) == {"w": 2}
    assert index.overlap(block_names(range(64), 16, salt="other salt")) == {}


def test_a_worker_that_is_gone_has_nothing_and_its_successor_starts_with_nothing(index: PrefixIndex) -> None:
    index.stored("old", [A, B])
    index.stored("staying", [A])
    index.cleared("old")
    assert index.overlap([A, B]) == {"staying": 1}
    index.stored("new", [D])
    assert index.overlap([A, B]) == {"staying": 1}
    assert index.overlap([D]) == {"new": 1}
    assert (len(index), index.blocks("old"), index.blocks("new")) == (2, 0, 1)


def test_unknown_blocks_and_workers_can_be_removed_and_cleared(index: PrefixIndex) -> None:
    index.removed("w", [A])
    index.cleared("w")
    index.stored("w", [A])
    index.removed("w", [B])
    assert index.overlap([A]) == {"w": 1}


@pytest.mark.parametrize("workers", [1, FEW, FEW + 1, 1000])
def test_any_number_of_workers_can_share_a_prefix(index: PrefixIndex, workers: int) -> None:
    for number in range(workers):
        index.stored(f"w{number}", [A, B] if number % 3 else [A])
    assert index.overlap([A, B]) == {f"w{number}": 2 if number % 3 else 1 for number in range(workers)}


def test_check_finds_maps_that_do_not_agree() -> None:
    class Forgetful(PrefixIndex):
        def forget(self) -> None:
            self._holders.clear()

    index = Forgetful()
    index.stored("w", [A])
    index.forget()
    with pytest.raises(AssertionError, match="do not add up"):
        index.check()


class Naive:
    """A simple model of the index: a set of blocks for each worker."""

    def __init__(self) -> None:
        self.sets: dict[str, set[BlockName]] = {}

    def overlap(self, names: list[BlockName]) -> dict[str, int]:
        counts = {worker: sum(1 for _ in takewhile(known.__contains__, names)) for worker, known in self.sets.items()}
        return {worker: count for worker, count in counts.items() if count}


NAMES = st.lists(st.sampled_from([bytes([letter]) for letter in range(6)]), max_size=6)
WORKERS = st.sampled_from([f"w{number}" for number in range(FEW + 4)])
EVENTS = st.tuples(st.sampled_from(["stored", "stored", "removed", "cleared"]), WORKERS, NAMES)


@given(st.lists(EVENTS, max_size=80), NAMES)
def test_after_any_events_the_index_agrees_with_sets(
    events: list[tuple[str, str, list[BlockName]]], lookup: list[BlockName]
) -> None:
    index, naive = PrefixIndex(), Naive()
    for what, worker, names in events:
        known = naive.sets.setdefault(worker, set())
        if what == "stored":
            index.stored(worker, names)
            known.update(names)
        elif what == "removed":
            index.removed(worker, names)
            known.difference_update(names)
        else:
            index.cleared(worker)
            known.clear()
        index.check()
    assert index.overlap(lookup) == naive.overlap(lookup)
    assert {worker: index.blocks(worker) for worker in naive.sets} == {w: len(s) for w, s in naive.sets.items()}
