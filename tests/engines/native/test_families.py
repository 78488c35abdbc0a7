"""For every family, greedy output in float32 equals `transformers.generate`, token for token, however it is computed.

With `top_k=1` each choice is its own sequence that must still be greedy; at temperature 0 a group is computed once.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.native.conftest import GREEDY_TOKENS, Expected
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.tiny_models import FAMILIES, Reference, assert_greedy_equal, assert_lively

pytestmark = pytest.mark.slow

LENGTHS = (5, 64, 33, 130)

Tiny = Callable[[str], Path]
References = Callable[[str], Reference]


SOME_LONG = [
    family if family in ("llama", "gemma2", "gemma3") else pytest.param(family, marks=pytest.mark.long)
    for family in FAMILIES
]
"""Families with different kinds of attention. `make test-long` runs all families."""


def assert_equal(reference: Reference, length: int, tokens: list[int], expected: list[int]) -> None:
    assert_greedy_equal(reference, prompt_of(length, length), tokens, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_models_generate_varied_tokens(family: str, reference: References) -> None:
    assert_lively(reference(family).greedy(prompt_of(40, 1), 200), 40)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "budget", [pytest.param(512, marks=pytest.mark.long, id="complete prompts"), pytest.param(48, id="chunks")]
)
def test_ragged_batches_of_groups_equal_generate(
    family: str, budget: int, device: str, tiny: Tiny, reference: References, expected: Expected
) -> None:
    core = make_core(tiny(family), budget=budget, max_num_seqs=24, device=device)
    sizes = dict(zip(LENGTHS, (1, 5, 2, 3), strict=True))
    requests = [
        group(f"{length}", prompt_of(length, length), n=n, max_tokens=GREEDY_TOKENS, top_k=1)
        for length, n in sizes.items()
    ]
    outcomes = run(core, requests, stagger=3)
    for length, n in sizes.items():
        outcome = outcomes[f"{length}"]
        assert sorted(outcome.tokens) == list(range(n))
        for tokens in outcome.tokens.values():
            assert_equal(reference(family), length, tokens, expected(family, length))


@pytest.mark.parametrize("family", SOME_LONG)
def test_a_prefix_hit_changes_nothing(
    family: str, device: str, tiny: Tiny, reference: References, expected: Expected
) -> None:
    core = make_core(tiny(family), device=device)
    prompt = prompt_of(130, 130)
    first = run(core, [group("first", prompt, max_tokens=GREEDY_TOKENS, temperature=0.0)])["first"]
    other = run(core, [group("other", prompt[:70] + prompt_of(9, 5), max_tokens=4, temperature=0.0)])["other"]
    again = run(core, [group("again", prompt, max_tokens=GREEDY_TOKENS, temperature=0.0)])["again"]
    assert first.prompt is not None and other.prompt is not None and again.prompt is not None
    assert (first.prompt.cached_tokens, other.prompt.cached_tokens, again.prompt.cached_tokens) == (0, 64, 128)
    if device == "cpu":
        assert first.tokens == again.tokens, "on a GPU they can differ where two tokens are about equally likely"
    assert_equal(reference(family), 130, again.tokens[0], expected(family, 130))


@pytest.mark.parametrize("family", SOME_LONG)
def test_preemption_changes_nothing(
    family: str, device: str, tiny: Tiny, reference: References, expected: Expected
) -> None:
    core = make_core(tiny(family), blocks=40, max_model_len=256, device=device)
    requests = [
        group("a", prompt_of(64, 64), n=3, max_tokens=GREEDY_TOKENS, top_k=1),
        group("b", prompt_of(33, 33), n=3, max_tokens=GREEDY_TOKENS, top_k=1),
    ]
    outcomes = run(core, requests)
    assert core.counters.preemptions > 0 and core.counters.replayed_tokens > 0
    for name, length in (("a", 64), ("b", 33)):
        for tokens in outcomes[name].tokens.values():
            assert_equal(reference(family), length, tokens, expected(family, length))


def test_a_greedy_group_is_computed_once_and_answered_n_times(
    device: str, tiny: Tiny, reference: References, expected: Expected
) -> None:
    core = make_core(tiny("llama"), device=device)
    outcome = run(core, [group("g", prompt_of(33, 33), n=6, max_tokens=GREEDY_TOKENS, temperature=0.0)])["g"]
    assert outcome.tokens == dict.fromkeys(range(6), outcome.tokens[0])
    assert_equal(reference("llama"), 33, outcome.tokens[0], expected("llama", 33))
    assert core.counters.trunk_tokens_read == core.counters.trunk_tokens_unshared, "one sequence, not six"
    assert core.counters.generated_tokens == 6 * GREEDY_TOKENS
    assert core.counters.greedy_choices_shared == 5
