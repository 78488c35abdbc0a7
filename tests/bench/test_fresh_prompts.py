"""Fresh prompts start differently, so that no prefix cache contains them."""

from bench.client.fresh_prompts import PREFIX_TOKENS, FreshPrompts


def test_prompts_of_all_lengths_start_differently() -> None:
    fresh = FreshPrompts([1, 2, 1], seed=0)
    prompts = [fresh.next(length) for length in (9, 20) * 100]  # there are 256 possible starts
    assert [len(prompt) for prompt in prompts] == [9, 20] * 100
    assert len({tuple(prompt[:PREFIX_TOKENS]) for prompt in prompts}) == 200


def test_after_the_start_the_text_repeats() -> None:
    assert FreshPrompts([1, 2, 3], seed=0).next(PREFIX_TOKENS + 7)[PREFIX_TOKENS:] == [1, 2, 3, 1, 2, 3, 1]


def test_a_seed_determines_the_prompts() -> None:
    tokens = range(100)
    assert FreshPrompts(tokens, seed=7).next(50) == FreshPrompts(tokens, seed=7).next(50)
    assert FreshPrompts(tokens, seed=7).next(50) != FreshPrompts(tokens, seed=8).next(50)
