"""There is capacity for a group if some worker could start it at once."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine import Worker
from motet.routing.queue.capacity import CapacityCache, have_capacity
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.testing.fake_engine import FakeEngine, fake_info
from tests.clock import Clock
from tests.routing.scene import script

MAX_CHOICES = 8
BLOCKS = 20
PROMPT = 33
"""Number of tokens that fill three blocks."""


def fleet(count: int, clock: Clock | None = None) -> list[Member]:
    """Returns idle workers."""
    info = msgspec.structs.replace(fake_info(), max_num_seqs=MAX_CHOICES, num_blocks=BLOCKS)
    members = Fleet(clock=clock or Clock())
    return [members.put(Worker(f"both-{n}", FakeEngine(script, info=info), "127.0.0.1:1")) for n in range(count)]


def capacity_for(
    members: list[Member],
    choices: int,
    *,
    largest_part: int = 0,
    prompt_tokens: int = PROMPT,
    choices_prefilling: int = 0,
) -> bool:
    part = largest_part or choices
    return have_capacity(
        members, choices=choices, largest_part=part, prompt_tokens=prompt_tokens, choices_prefilling=choices_prefilling
    )


def test_without_workers_there_is_no_capacity() -> None:
    assert not capacity_for([], 1)


def test_a_worker_that_was_not_reached_has_no_capacity() -> None:
    assert not capacity_for([Fleet().expect("both-0", "127.0.0.1:1")], 1)


@pytest.mark.parametrize(("open_choices", "choices"), [(1, 7), (7, 1), (4, 4)])
def test_there_is_capacity_up_to_the_maximum_number_of_choices(open_choices: int, choices: int) -> None:
    (member,) = members = fleet(1)
    member.load.given_choices = open_choices
    assert capacity_for(members, choices)
    assert not capacity_for(members, choices + 1)


def test_choices_of_other_routers_take_capacity_too() -> None:
    (member,) = members = fleet(1)
    member.load.record_report(5)
    assert capacity_for(members, 3)
    assert not capacity_for(members, 4)


def test_capacity_on_two_workers_is_not_added_up() -> None:
    members = fleet(2)
    for member in members:
        member.load.given_choices = 5
    assert capacity_for(members, 3)
    assert not capacity_for(members, 4)


@pytest.mark.parametrize(("trunk_blocks", "tail_blocks"), [(13, 0), (0, 13), (7, 6)])
def test_a_group_needs_blocks_for_its_trunk_and_one_tail_block_a_choice(trunk_blocks: int, tail_blocks: int) -> None:
    (member,) = members = fleet(1)
    member.load.given_choices = 1
    member.load.trunk_blocks, member.load.tail_blocks = trunk_blocks, tail_blocks
    assert capacity_for(members, 4)  # 13 held + 3 + 4 of 20
    assert not capacity_for(members, 5)
    assert not capacity_for(members, 4, prompt_tokens=PROMPT + 16)


def test_an_idle_worker_has_capacity_for_a_group_of_any_size() -> None:
    (member,) = members = fleet(1)
    assert capacity_for(members, 100, prompt_tokens=10_000)
    member.load.given_choices = 1
    assert not capacity_for(members, 100)


def test_a_worker_that_has_just_refused_has_no_capacity() -> None:
    clock = Clock()
    members = fleet(1, clock)
    members[0].faults.record_refusal()
    assert not capacity_for(members, 1)
    clock.now_s += 0.5
    assert capacity_for(members, 1)


def test_choices_in_prefill_take_capacity_before_any_load_has_them() -> None:
    members = fleet(2)
    assert capacity_for(members, 8, choices_prefilling=8)
    assert not capacity_for(members, 8, choices_prefilling=9)
    members[0].load.given_choices = 6
    assert capacity_for(members, 8, choices_prefilling=2)
    assert not capacity_for(members, 8, choices_prefilling=3)


def test_an_overfull_worker_takes_no_capacity_from_others() -> None:
    full, other = members = fleet(2)
    full.load.given_choices = MAX_CHOICES + 20
    other.load.given_choices = 2
    assert capacity_for(members, 4, choices_prefilling=2)
    assert not capacity_for(members, 4, choices_prefilling=3)


def test_a_split_group_needs_capacity_for_a_part_on_one_worker_and_all_in_total() -> None:
    members = fleet(3)
    for member in members:
        member.load.given_choices = 4
    assert capacity_for(members, 12, largest_part=4)
    assert not capacity_for(members, 12, largest_part=5)
    assert not capacity_for(members, 13, largest_part=4)
    assert not capacity_for(members, 12, largest_part=4, choices_prefilling=1)


def test_a_group_larger_than_all_workers_starts_when_they_are_idle() -> None:
    members = fleet(2)
    assert capacity_for(members, 2 * MAX_CHOICES + 1, largest_part=MAX_CHOICES)
    members[0].load.given_choices = 1
    assert not capacity_for(members, 2 * MAX_CHOICES + 1, largest_part=MAX_CHOICES)


def test_the_check_for_capacity_ends_at_the_first_worker_that_has_it() -> None:
    members = iter(fleet(3))
    assert have_capacity(members, choices=1, largest_part=1, prompt_tokens=PROMPT, choices_prefilling=0)
    assert len(list(members)) == 2


SIZES = st.tuples(st.integers(1, 12), st.integers(1, 400))


@given(groups=st.lists(SIZES, max_size=30), open_choices=st.lists(st.integers(0, MAX_CHOICES), max_size=3))
def test_one_cache_for_many_groups_agrees_with_a_check_for_each(
    groups: list[tuple[int, int]], open_choices: list[int]
) -> None:
    members = fleet(len(open_choices))
    for member, choices in zip(members, open_choices, strict=True):
        member.load.given_choices = member.load.tail_blocks = choices
    cache = CapacityCache()
    for choices, tokens in groups:
        fits = cache.fits(choices, tokens, has_capacity=lambda c, t: capacity_for(members, c, prompt_tokens=t))
        assert fits == capacity_for(members, choices, prompt_tokens=tokens)


def test_a_cache_checks_once_for_groups_of_a_size() -> None:
    sizes = []

    def never(choices: int, prompt_tokens: int) -> bool:
        sizes.append((choices, prompt_tokens))
        return False

    cache = CapacityCache()
    for choices, tokens in [(4, 100), (4, 100), (5, 300), (3, 200), (8, 90), (2, 50), (2, 51), (8, 90)]:
        assert not cache.fits(choices, tokens, has_capacity=never)
    assert sizes == [(4, 100), (3, 200), (8, 90), (2, 50)]
