"""The order in which waiting groups start. None waits for ever."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.routing.queue.fair_queue import FairQueue

PER_CHOICE_S = 1.0
MAX_DELAY_S = 40.0
PATIENCE_S = 5.0


def queue(max_wait_s: float = 1000.0) -> FairQueue[str]:
    return FairQueue(max_wait_s=max_wait_s, per_choice_s=PER_CHOICE_S, max_delay_s=MAX_DELAY_S, patience_s=PATIENCE_S)


def anything(_: str) -> bool:
    return True


def nothing(_: str) -> bool:
    return False


def only(*items: str) -> Callable[[str], bool]:
    return lambda item: item in items


def popped(waiting: FairQueue[str], now_s: float = 0.0) -> list[str]:
    items = []
    while (item := waiting.pop(anything, now_s)) is not None:
        items.append(item)
    return items


def test_equal_groups_start_in_the_order_of_arrival() -> None:
    waiting = queue()
    for number in range(4):
        waiting.push(f"g{number}", choices=3, priority=0, now_s=0.0)
    assert popped(waiting) == ["g0", "g1", "g2", "g3"]
    assert len(waiting) == 0


def test_a_small_group_overtakes_a_large_one_that_came_shortly_before_and_no_other() -> None:
    waiting = queue()
    waiting.push("large", choices=8, priority=0, now_s=0.0)
    waiting.push("small", choices=1, priority=0, now_s=6.9)
    waiting.push("late", choices=1, priority=0, now_s=7.1)
    assert popped(waiting) == ["small", "large", "late"]


def test_above_a_certain_size_the_delay_of_a_group_does_not_grow() -> None:
    waiting = queue()
    waiting.push("largest", choices=1000, priority=0, now_s=0.0)
    waiting.push("small", choices=1, priority=0, now_s=MAX_DELAY_S - 1.1)
    waiting.push("late", choices=1, priority=0, now_s=MAX_DELAY_S - 0.9)
    assert popped(waiting) == ["small", "largest", "late"]


def test_the_group_with_the_lower_priority_number_starts_first_whatever_its_size() -> None:
    waiting = queue()
    waiting.push("usual", choices=1, priority=0, now_s=0.0)
    waiting.push("urgent", choices=64, priority=-1, now_s=9.0)
    waiting.push("idle", choices=1, priority=1, now_s=0.0)
    assert popped(waiting) == ["urgent", "usual", "idle"]


def test_a_group_that_does_not_fit_is_skipped_for_some_time_then_gets_a_reservation() -> None:
    waiting = queue()
    waiting.push("large", choices=2, priority=0, now_s=0.0)
    for number in range(3):
        waiting.push(f"small{number}", choices=1, priority=0, now_s=2.0)
    small = only("small0", "small1", "small2")
    assert waiting.pop(small, 10.0) == "small0", "patience begins when it does not fit, not when it came"
    assert waiting.pop(small, 10.0 + PATIENCE_S - 0.1) == "small1"
    assert waiting.pop(small, 10.0 + PATIENCE_S) is None
    assert waiting.pop(anything, 99.0) == "large"
    assert waiting.pop(small, 99.0) == "small2"


def test_patience_runs_for_every_group_that_is_skipped() -> None:
    waiting = queue()
    waiting.push("first", choices=1, priority=0, now_s=0.0)
    waiting.push("second", choices=1, priority=0, now_s=0.1)
    waiting.push("small", choices=1, priority=0, now_s=0.2)
    assert waiting.pop(nothing, 1.0) is None
    assert waiting.pop(only("first", "small"), 1.0 + PATIENCE_S) == "first"
    assert waiting.pop(only("small"), 1.0 + PATIENCE_S) is None, "room is kept for the second"


def test_a_client_that_left_is_not_in_the_queue_and_leaving_twice_changes_nothing() -> None:
    waiting = queue()
    waiting.push("a", choices=1, priority=0, now_s=0.0)
    waiting.push("b", choices=1, priority=0, now_s=0.0)
    waiting.remove("a")
    waiting.remove("a")
    assert popped(waiting) == ["b"]


def test_groups_that_waited_too_long_are_returned_once_longest_wait_first() -> None:
    waiting = queue(max_wait_s=10.0)
    waiting.push("large", choices=50, priority=0, now_s=0.0)
    waiting.push("small", choices=1, priority=0, now_s=1.0)
    waiting.push("fresh", choices=1, priority=0, now_s=2.0)
    assert waiting.expired(9.9) == []
    assert waiting.expired(11.0) == ["large", "small"]
    assert waiting.expired(11.0) == []
    assert popped(waiting) == ["fresh"]


def test_an_item_is_in_the_queue_once() -> None:
    waiting = queue()
    waiting.push("a", choices=1, priority=0, now_s=0.0)
    with pytest.raises(ValueError, match="already in the queue"):
        waiting.push("a", choices=1, priority=0, now_s=0.0)


@dataclass(frozen=True)
class Group:
    number: int
    choices: int
    arrival_s: float


def delay_s(group: Group) -> float:
    return min(group.choices * PER_CHOICE_S, MAX_DELAY_S)


ARRIVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 64)), min_size=1, max_size=40)


@given(ARRIVALS)
def test_no_group_is_overtaken_by_a_group_that_arrives_later_than_its_size_allows(
    arrivals: list[tuple[int, int]],
) -> None:
    """The first bound of the module: all fit, and one starts every second."""
    waiting: FairQueue[Group] = FairQueue(
        max_wait_s=1e9, per_choice_s=PER_CHOICE_S, max_delay_s=MAX_DELAY_S, patience_s=PATIENCE_S
    )
    groups = [Group(n, choices, float(at)) for n, (at, choices) in enumerate(sorted(arrivals))]
    started: list[Group] = []
    for second in range(31 + len(groups)):
        for group in groups:
            if group.arrival_s == second:
                waiting.push(group, choices=group.choices, priority=0, now_s=group.arrival_s)
        if (group_or_none := waiting.pop(lambda _: True, float(second))) is not None:
            started.append(group_or_none)
    assert sorted(started, key=lambda group: group.number) == groups
    for index, group in enumerate(started):
        for before in started[:index]:
            assert before.arrival_s <= group.arrival_s + max(0.0, delay_s(group) - delay_s(before))


class Server:
    """A server with capacity for this number of choices. Each group keeps its share for twelve seconds."""

    def __init__(self, choices: int) -> None:
        self.choices = choices
        self.now_s = 0.0
        self.running: list[tuple[float, Group]] = []
        self.refused_s: dict[Group, float] = {}

    def fits(self, group: Group) -> bool:
        taken = sum(other.choices for end_s, other in self.running if end_s > self.now_s)
        fits = group.choices <= self.choices - taken
        if not fits:
            self.refused_s.setdefault(group, self.now_s)
        return fits


@pytest.mark.parametrize("seed", range(20))
def test_no_group_starts_before_a_group_that_did_not_fit_for_its_patience(seed: int) -> None:
    """The second bound of the module: every group has its turn, even if it needs half the capacity or all of it."""
    random = Random(seed)
    arrivals = [(random.randrange(60), random.choice([1, 2, 4, 8, 8, 8, 32, 64])) for _ in range(80)]
    waiting: FairQueue[Group] = FairQueue(
        max_wait_s=1e9, per_choice_s=PER_CHOICE_S, max_delay_s=MAX_DELAY_S, patience_s=PATIENCE_S
    )
    groups = [Group(n, choices, float(at)) for n, (at, choices) in enumerate(sorted(arrivals))]
    server = Server(64)
    started: set[Group] = set()

    def tag(group: Group) -> tuple[float, int]:
        return group.arrival_s + delay_s(group), group.number

    for second in range(60 + 15 * len(groups)):
        server.now_s = float(second)
        for group in groups:
            if group.arrival_s == second:
                waiting.push(group, choices=group.choices, priority=0, now_s=server.now_s)
        while (chosen := waiting.pop(server.fits, server.now_s)) is not None:
            impatient = [one for one, at_s in server.refused_s.items() if server.now_s >= at_s + PATIENCE_S]
            assert all(tag(chosen) <= tag(group) for group in impatient if group not in started)
            started.add(chosen)
            server.running.append((server.now_s + 12.0, chosen))
    assert started == set(groups)
    assert len(waiting) == 0
