"""The choice of the worker that gets the next group, and its reason."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.routing.choosing.choose import Reason, choose
from motet.routing.choosing.cost import WEIGHTS, Candidate, GroupNeeds, cost, has_capacity
from motet.routing.workers.serving import WorkKind
from motet.settings.server_config import Policy

GROUP = GroupNeeds(work=WorkKind.GENERATE, choices=8, prompt_tokens=1600, needs_prompt=True)
IDLE = Candidate(
    id="w",
    cached_tokens=0,
    queued_tokens=0,
    open_choices=0,
    trunk_blocks=0,
    tail_blocks=0,
    max_choices=256,
    num_blocks=10_000,
    block_size=16,
)


@dataclass(frozen=True)
class Chosen:
    """Index of the chosen candidate, and the reason."""

    index: int
    reason: str


def chosen(*candidates: Candidate, needs: GroupNeeds = GROUP, policy: Policy = Policy.KV, turn: int = 0) -> Chosen:
    decision = choose(candidates, needs, policy=policy, turn=turn)
    assert decision is not None
    return Chosen(decision.index, decision.reason)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("work", WorkKind)
def test_without_workers_none_is_chosen(policy: Policy, work: WorkKind) -> None:
    assert choose([], replace(GROUP, work=work), policy=policy, turn=3) is None


@pytest.mark.parametrize("policy", Policy)
def test_the_only_worker_is_chosen_even_if_it_is_full_and_to_be_avoided(policy: Policy) -> None:
    assert chosen(replace(IDLE, avoid=True, open_choices=256), policy=policy) == Chosen(index=0, reason=Reason.ONLY_ONE)


@pytest.mark.parametrize("policy", Policy)
def test_a_worker_to_be_avoided_is_chosen_only_if_there_is_no_other(policy: Policy) -> None:
    avoided, full = replace(IDLE, avoid=True), replace(IDLE, open_choices=250)
    assert chosen(avoided, full, policy=policy) == Chosen(index=1, reason=Reason.CAPACITY)
    assert chosen(avoided, avoided, policy=policy).index == 0


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(
    "full",
    [
        replace(IDLE, max_choices=7, has_session=True),
        replace(IDLE, open_choices=249, cached_tokens=1600),
        replace(IDLE, num_blocks=107),
        replace(IDLE, trunk_blocks=9_000, tail_blocks=893),
    ],
)
def test_a_worker_without_capacity_for_all_choices_is_worse_than_the_busiest(full: Candidate, policy: Policy) -> None:
    busy = replace(IDLE, open_choices=248, queued_tokens=100_000)
    assert chosen(full, busy, policy=policy) == Chosen(index=1, reason=Reason.CAPACITY)


def test_scored_prompts_go_to_the_worker_with_their_prefix_until_it_has_many_of_them() -> None:
    """The bug: questions of one token about a text spread as if each had 48 steps to wait for the others."""
    question = replace(GROUP, choices=1, prompt_tokens=1237, max_tokens=1)
    with_12 = replace(IDLE, cached_tokens=1200, queued_tokens=12 * 37, open_choices=12, trunk_blocks=75, tail_blocks=12)
    with_24 = replace(with_12, queued_tokens=24 * 37, open_choices=24, tail_blocks=24)
    assert chosen(IDLE, with_12, needs=question) == Chosen(index=1, reason=Reason.PREFIX)
    assert chosen(IDLE, with_24, needs=question).index == 0


def test_cached_blocks_of_the_prompt_take_no_capacity() -> None:
    tight = replace(IDLE, trunk_blocks=9_900, num_blocks=10_000)
    assert not has_capacity(tight, GROUP)
    assert has_capacity(replace(tight, cached_tokens=160), GROUP)


def test_capacity_is_counted_in_blocks_of_the_worker() -> None:
    large = replace(IDLE, num_blocks=13 + 8, block_size=128)  # 12.5 blocks of prompt, and a tail for each choice
    assert has_capacity(large, GROUP)
    assert not has_capacity(replace(large, num_blocks=20), GROUP)
    assert has_capacity(replace(large, num_blocks=20, cached_tokens=128), GROUP)


def test_a_prefill_needs_blocks_and_no_capacity_for_choices() -> None:
    prefill = replace(GROUP, work=WorkKind.PREFILL)
    assert has_capacity(replace(IDLE, open_choices=256, num_blocks=100), prefill)
    assert not has_capacity(replace(IDLE, num_blocks=99), prefill)


def test_a_cached_prefix_attracts_a_group_and_is_the_reason() -> None:
    assert chosen(IDLE, replace(IDLE, cached_tokens=800)) == Chosen(index=1, reason=Reason.PREFIX)


def test_a_cached_prefix_that_would_not_have_been_needed_is_not_the_reason() -> None:
    busy = replace(IDLE, open_choices=64)
    assert chosen(busy, replace(IDLE, cached_tokens=800)) == Chosen(index=1, reason=Reason.COST)


def test_a_queue_longer_than_the_cached_prefix_drives_a_group_away() -> None:
    assert chosen(replace(IDLE, cached_tokens=800, queued_tokens=801), IDLE).index == 1
    assert chosen(replace(IDLE, cached_tokens=800, queued_tokens=799), IDLE).index == 0


def test_a_group_counts_as_its_choices_and_not_as_one() -> None:
    one_of_32 = replace(IDLE, open_choices=32, trunk_blocks=84, tail_blocks=64)
    three_of_1 = replace(IDLE, open_choices=3, trunk_blocks=84, tail_blocks=6)
    assert chosen(one_of_32, three_of_1).index == 1


def test_a_trunk_counts_once_for_any_number_of_choices() -> None:
    one_trunk = replace(IDLE, open_choices=8, trunk_blocks=84, tail_blocks=16)
    eight_trunks = replace(one_trunk, trunk_blocks=8 * 84)
    assert chosen(eight_trunks, one_trunk).index == 1


def test_with_a_ticket_a_cached_prompt_weighs_less_than_one_open_choice() -> None:
    with_ticket = replace(GROUP, needs_prompt=False)
    has_prompt = replace(IDLE, cached_tokens=1600, open_choices=1)
    assert chosen(has_prompt, IDLE, needs=with_ticket).index == 1
    assert chosen(replace(has_prompt, open_choices=0), IDLE, needs=with_ticket, turn=1) == Chosen(
        index=0, reason=Reason.PREFIX
    )


def test_a_session_stays_while_its_worker_costs_at_most_its_prompt_and_the_slack() -> None:
    limit = GROUP.prompt_tokens + int(WEIGHTS.session_slack)
    home = replace(IDLE, has_session=True, queued_tokens=limit)
    assert chosen(IDLE, home) == Chosen(index=1, reason=Reason.SESSION)
    assert chosen(IDLE, replace(home, queued_tokens=limit + 1)) == Chosen(index=0, reason=Reason.COST)


def test_a_session_whose_prompt_is_known_to_be_cached_is_not_counted_twice() -> None:
    home = replace(IDLE, has_session=True, cached_tokens=1600, queued_tokens=1600 + int(WEIGHTS.session_slack))
    assert chosen(IDLE, home) == Chosen(index=1, reason=Reason.SESSION)
    assert chosen(IDLE, replace(home, queued_tokens=home.queued_tokens + 1)).index == 0


def test_the_session_policy_starts_at_the_least_loaded_and_stays_at_any_cost() -> None:
    home = replace(IDLE, has_session=True, open_choices=200, queued_tokens=10**6)
    assert chosen(IDLE, home, policy=Policy.SESSION) == Chosen(index=1, reason=Reason.SESSION)
    assert chosen(replace(IDLE, open_choices=2), replace(IDLE, open_choices=1), policy=Policy.SESSION) == Chosen(
        index=1, reason=Reason.LOAD
    )


def test_least_loaded_compares_choices_then_blocks_and_for_prefill_the_queue() -> None:
    few, many = replace(IDLE, open_choices=1, queued_tokens=50), replace(IDLE, open_choices=2, queued_tokens=40)
    assert chosen(many, few, policy=Policy.LEAST_LOADED) == Chosen(index=1, reason=Reason.LOAD)
    assert chosen(few, many, needs=replace(GROUP, work=WorkKind.PREFILL), policy=Policy.LEAST_LOADED).index == 1
    assert chosen(replace(few, tail_blocks=1), few, policy=Policy.LEAST_LOADED).index == 1


def test_round_robin_skips_workers_without_capacity() -> None:
    full = replace(IDLE, open_choices=256)
    max_choices = [chosen(IDLE, full, IDLE, policy=Policy.ROUND_ROBIN, turn=turn).index for turn in range(4)]
    assert max_choices == [0, 2, 2, 0]


@pytest.mark.parametrize("policy", Policy)
def test_equal_workers_take_turns(policy: Policy) -> None:
    assert [chosen(IDLE, IDLE, IDLE, policy=policy, turn=turn).index for turn in range(5)] == [0, 1, 2, 0, 1]


def test_the_explanation_names_the_costs_and_their_parts() -> None:
    decision = choose([replace(IDLE, id="a", queued_tokens=9), replace(IDLE, id="b")], GROUP, policy=Policy.KV, turn=0)
    assert decision is not None
    assert decision.why == "lowest of 2: b 1600 (own 1600, queued 0, load 0), a 1609 (own 1600, queued 9, load 0)"


def test_the_explanation_names_a_handful_of_a_thousand_workers() -> None:
    decision = choose([IDLE] * 1000, GROUP, policy=Policy.KV, turn=0)
    assert decision is not None
    assert decision.why.count("own") == 4


CANDIDATES = st.builds(
    Candidate,
    id=st.just("w"),
    cached_tokens=st.integers(0, 1600),
    queued_tokens=st.integers(0, 5000),
    open_choices=st.integers(0, 300),
    trunk_blocks=st.integers(0, 8000),
    tail_blocks=st.integers(0, 3000),
    max_choices=st.just(256),
    num_blocks=st.just(10_000),
    block_size=st.sampled_from([16, 16, 128]),
    avoid=st.booleans(),
)


@given(st.lists(CANDIDATES, min_size=2, max_size=8), st.integers(0, 100), st.booleans())
def test_no_eligible_worker_costs_less_than_the_chosen_one(
    candidates: list[Candidate], turn: int, needs_prompt: bool
) -> None:
    needs = replace(GROUP, needs_prompt=needs_prompt)
    place = chosen(*candidates, needs=needs, turn=turn).index

    def rank(one: Candidate) -> tuple[bool, bool, float]:
        return one.avoid, not has_capacity(one, needs), cost(one, needs)

    assert rank(candidates[place]) == min(rank(one) for one in candidates)
