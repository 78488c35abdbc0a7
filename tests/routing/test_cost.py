"""What it costs to put a group on a worker."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from motet.routing.candidate import Candidate, Wanted, Work
from motet.routing.cost import Weights, cost, explained, own_cost

WEIGHTS = Weights(choice=100.0, trunk_block=10.0, tail_block=2.0, pulled_token=0.25)
GROUP = Wanted(work=Work.GENERATE, choices=4, prompt_tokens=400, needs_prompt=True)
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
    own = (400 - 80) * (1 + 3 / 4)  # four choices wait for the prompt, and three others stand still meanwhile
    assert cost(WORKER, GROUP, WEIGHTS) == own + 1000 + 3 * 100 + 7 * 10 + 5 * 2


def test_the_delay_of_others_weighs_more_for_a_small_group_and_nothing_on_an_idle_worker() -> None:
    alone = replace(WORKER, open_choices=0)
    single = replace(GROUP, choices=1)
    assert own_cost(WORKER, single) == 4 * (400 - 80)
    assert own_cost(alone, single) == own_cost(alone, GROUP) == 400 - 80


def test_with_a_ticket_only_a_pull_is_left_of_the_own_tokens() -> None:
    assert cost(WORKER, replace(GROUP, needs_prompt=False), WEIGHTS) == (400 - 80) / 4 + 1000 + 380


def test_no_worker_has_more_of_a_prompt_than_there_is() -> None:
    assert cost(replace(WORKER, cached_tokens=999), GROUP, WEIGHTS) == 1000 + 380


def test_the_explanation_names_the_worker_and_the_parts() -> None:
    assert explained(WORKER, GROUP, WEIGHTS) == "w3 1940 (own 560, queued 1000, load 380)"


@given(st.sampled_from(["queued_tokens", "open_choices", "trunk_blocks", "tail_blocks"]), st.integers(1, 100))
def test_whatever_a_worker_has_more_to_do_makes_it_dearer(what: str, more: int) -> None:
    busier = replace(WORKER, **{what: getattr(WORKER, what) + more})
    assert cost(busier, GROUP) > cost(WORKER, GROUP)


@given(st.integers(0, 400), st.integers(0, 400), st.booleans())
def test_whatever_more_is_cached_makes_it_cheaper(one: int, other: int, needs_prompt: bool) -> None:
    group = replace(GROUP, needs_prompt=needs_prompt)
    costs = [cost(replace(WORKER, cached_tokens=tokens), group) for tokens in (one, other)]
    assert (costs[0] < costs[1]) == (one > other)
