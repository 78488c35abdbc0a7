"""The order of the queue."""

from motet.engines.native.sequence import Group
from motet.engines.native.waiting import WaitingGroups
from tests.engines.native.paper import group_of, request


def groups(*priorities: int) -> list[Group]:
    return [group_of(request(f"g{i}", [1], priority=p), i) for i, p in enumerate(priorities)]


def names(waiting: WaitingGroups) -> list[str]:
    return [str(group.request.request_id) for group in waiting]


def test_equal_priorities_wait_in_order_of_arrival() -> None:
    waiting = WaitingGroups()
    for group in reversed(groups(0, 0, 0)):
        waiting.add(group)
    assert names(waiting) == ["g0", "g1", "g2"]


def test_lower_priority_numbers_go_first() -> None:
    waiting = WaitingGroups()
    for group in groups(5, 0, -1, 5, 0):
        waiting.add(group)
    assert names(waiting) == ["g2", "g1", "g4", "g0", "g3"]


def test_a_group_that_comes_back_stands_where_it_stood() -> None:
    waiting = WaitingGroups()
    one, two, three = groups(0, 0, 0)
    for group in (one, two, three):
        waiting.add(group)
    waiting.remove(two)
    assert names(waiting) == ["g0", "g2"]
    waiting.add(two)
    assert names(waiting) == ["g0", "g1", "g2"]


def test_an_empty_queue_has_no_first() -> None:
    waiting = WaitingGroups()
    assert waiting.first() is None
    assert len(waiting) == 0
    (group,) = groups(0)
    waiting.add(group)
    assert waiting.first() is group
    assert len(waiting) == 1
