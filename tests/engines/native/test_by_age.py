"""The order of queues."""

import pytest

from motet.engines.native.by_age import ByAge
from motet.engines.native.sequence import Group, Sequence
from tests.engines.native.paper import group_of, request


def groups(*priorities: int) -> list[Group]:
    return [group_of(request(f"g{i}", [1], priority=p), i) for i, p in enumerate(priorities)]


def queue_of(groups: list[Group]) -> ByAge[Group]:
    queue = ByAge[Group]()
    for group in groups:
        queue.add(group)
    return queue


def names(queue: ByAge[Group]) -> list[str]:
    return [str(group.request.request_id) for group in queue]


def test_equal_priorities_stand_in_order_of_arrival() -> None:
    assert names(queue_of(groups(0, 0, 0)[::-1])) == ["g0", "g1", "g2"]


def test_lower_priority_numbers_go_first() -> None:
    assert names(queue_of(groups(5, 0, -1, 5, 0))) == ["g2", "g1", "g4", "g0", "g3"]


def test_a_group_that_comes_back_stands_where_it_stood() -> None:
    one, two, three = groups(0, 0, 0)
    queue = queue_of([one, two, three])
    queue.remove(two)
    assert names(queue) == ["g0", "g2"]
    queue.add(two)
    assert names(queue) == ["g0", "g1", "g2"]


def test_choices_stand_by_their_groups_and_then_by_their_rank() -> None:
    one, two = (group_of(request(name, [1], n=2), arrival) for arrival, name in enumerate("ab"))
    queue = ByAge[Sequence]()
    for sequence in (*two.sequences, *one.sequences):
        queue.add(sequence)
    assert list(queue) == [*one.sequences, *two.sequences]


def test_who_is_not_there_cannot_be_removed() -> None:
    one, two, three = groups(0, 0, 0)
    queue = queue_of([one, three])
    for absent in (two, groups(0)[0]):  # the second has the age of one that is there
        with pytest.raises(ValueError, match="nothing of age"):
            queue.remove(absent)
    assert names(queue) == ["g0", "g2"]


def test_oldest_and_youngest_stand_at_the_ends() -> None:
    queue = ByAge[Group]()
    assert (queue.oldest(), queue.youngest(), len(queue)) == (None, None, 0)
    one, two = groups(0, 0)
    queue.add(one)
    queue.add(two)
    assert (queue.oldest(), queue.youngest(), len(queue)) == (one, two, 2)
