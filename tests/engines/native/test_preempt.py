"""Who gives up blocks, in which order."""

from motet.engines.native.preempt import TakeTail, TakeTrunk, choose_victim
from motet.engines.native.sequence import Group
from tests.engines.native.paper import group_of, request


def running(name: str, arrival: int, *, n: int, priority: int = 0) -> Group:
    """A group with a trunk of one block and one block a tail; which ones does not matter here."""
    group = group_of(request(name, [1, 2, 3], n=n, priority=priority), arrival)
    group.blocks = [100 * arrival]
    for sequence in group.sequences:
        sequence.blocks = [100 * arrival + 1 + sequence.rank]
    return group


def victims(groups: list[Group], asking: Group, choice: int) -> list[str]:
    """All that would be taken for the sake of one choice, in order, until its own tail goes."""
    order = []
    while True:
        victim = choose_victim(groups, asking.sequences[choice])
        if isinstance(victim, TakeTrunk):
            order.append(f"trunk of {victim.group.request.request_id}")
            victim.group.blocks = []
            continue
        order.append(f"{victim.sequence.group.request.request_id}{victim.sequence.rank}")
        victim.sequence.blocks = []
        if victim.sequence is asking.sequences[choice]:
            return order


def test_the_youngest_group_goes_first_tails_youngest_first_and_its_trunk_last() -> None:
    a, b, c = running("a", 0, n=2), running("b", 1, n=2), running("c", 2, n=1)
    assert victims([a, b, c], a, 0) == ["c0", "trunk of c", "b1", "b0", "trunk of b", "a1", "a0"]


def test_the_order_in_which_groups_run_does_not_matter() -> None:
    a, b, c = running("a", 0, n=2), running("b", 1, n=2), running("c", 2, n=1)
    assert victims([c, a, b], a, 0) == ["c0", "trunk of c", "b1", "b0", "trunk of b", "a1", "a0"]


def test_older_groups_and_older_siblings_are_never_touched() -> None:
    a, b = running("a", 0, n=2), running("b", 1, n=3)
    assert victims([a, b], b, 1) == ["b2", "b1"]


def test_a_lower_priority_number_is_older_whenever_it_came() -> None:
    a, b = running("a", 0, n=1, priority=1), running("b", 1, n=1, priority=0)
    assert victims([a, b], b, 0) == ["a0", "trunk of a", "b0"]


def test_the_asking_choice_is_taken_though_it_holds_no_block_yet() -> None:
    a, b = running("a", 0, n=1), running("b", 1, n=1)
    b.sequences[0].blocks = []
    assert victims([a, b], b, 0) == ["b0"]


def test_preempted_siblings_have_nothing_to_give() -> None:
    a, b = running("a", 0, n=3), running("b", 1, n=1)
    a.sequences[2].blocks = []
    b.sequences[0].blocks = []
    assert victims([a, b], a, 0) == ["trunk of b", "a1", "a0"]


def test_one_victim_is_one_tail() -> None:
    a, b = running("a", 0, n=1), running("b", 1, n=2)
    assert choose_victim([a, b], a.sequences[0]) == TakeTail(b.sequences[1])
