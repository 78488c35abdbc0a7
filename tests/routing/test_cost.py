"""The cost of placing a group on a worker."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from motet.routing.choosing.cost import Candidate, CostWeights, GroupNeeds, cost, explained, own_cost
from motet.routing.workers.serving import WorkKind

WEIGHTS = CostWeights(choice=100.0, trunk_block=10.0, tail_block=2.0, pulled_token=0.25)
GROUP = GroupNeeds(work=WorkKind.GENERATE, choices=4, prompt_tokens=400, needs_prompt=True)
WORKER = Candidate(
    id="w3",
    cached_tokens=80,
    queued_tokens=1000,
    open_choices=3,
    trunk_blocks=7,
    tail_blocks=5,
    max_choices=256,
    num_blocks=1000,
    block_size=16,
)


def test_cost_is_own_and_queued_tokens_and_each_choice_trunk_block_and_tail_block() -> None:
    # own: 320 tokens are not cached. Four choices wait for them, and three other choices are delayed, which adds 240:
    # 560. queued: 1000. load: 3 choices of 100, 7 trunk blocks of 10, 5 tail blocks of 2: 380.
    assert cost(WORKER, GROUP, weights=WEIGHTS) == 1940.0


def test_delaying_others_costs_more_for_a_small_group_and_nothing_when_idle() -> None:
    alone = replace(WORKER, open_choices=0)
    single = replace(GROUP, choices=1)
    assert own_cost(WORKER, single) == 1280.0  # 320 tokens: one choice waits, and three others are delayed
    assert own_cost(alone, single) == own_cost(alone, GROUP) == 320.0


def test_the_load_of_a_worker_counts_for_as_many_steps_as_a_group_needs() -> None:
    assert cost(WORKER, replace(GROUP, max_tokens=12), weights=WEIGHTS) == 560 + 1000 + 380 / 4
    assert cost(WORKER, replace(GROUP, max_tokens=500), weights=WEIGHTS) == 1940.0


def test_with_a_ticket_the_own_tokens_cost_only_a_pull() -> None:
    # 320 tokens to pull cost a quarter of a token each: 80. No other choice is delayed.
    assert cost(WORKER, replace(GROUP, needs_prompt=False), weights=WEIGHTS) == 1460.0


def test_a_block_weighs_by_its_tokens() -> None:
    # Blocks have half as many tokens as the weights expect, so they cost 40 instead of 80.
    assert cost(replace(WORKER, block_size=8), GROUP, weights=WEIGHTS) == 1900.0


def test_cached_tokens_beyond_the_prompt_do_not_count() -> None:
    assert cost(replace(WORKER, cached_tokens=999), GROUP, weights=WEIGHTS) == 1380.0


def test_the_explanation_names_the_worker_and_the_parts() -> None:
    assert explained(WORKER, GROUP, weights=WEIGHTS) == "w3 1940 (own 560, queued 1000, load 380)"


@given(st.sampled_from(["queued_tokens", "open_choices", "trunk_blocks", "tail_blocks"]), st.integers(1, 100))
def test_more_work_of_any_kind_raises_the_cost_of_a_worker(what: str, more: int) -> None:
    busier = replace(WORKER, **{what: getattr(WORKER, what) + more})
    assert cost(busier, GROUP) > cost(WORKER, GROUP)


@given(st.integers(0, 400), st.integers(0, 400), st.booleans())
def test_more_cached_tokens_lower_the_cost_of_a_worker(one: int, other: int, needs_prompt: bool) -> None:
    group = replace(GROUP, needs_prompt=needs_prompt)
    costs = [cost(replace(WORKER, cached_tokens=tokens), group) for tokens in (one, other)]
    assert (costs[0] < costs[1]) == (one > other)
