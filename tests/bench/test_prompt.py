"""Prompts that no prefix cache knows."""

from bench.prompt import BEGINNING, FreshPrompts


def test_no_prompt_begins_as_another_whatever_their_lengths() -> None:
    fresh = FreshPrompts([1, 2, 1], seed=0)
    drawn = [fresh.next(length) for length in (9, 20) * 100]  # of 256 beginnings there can be
    assert [len(prompt) for prompt in drawn] == [9, 20] * 100
    assert len({tuple(prompt[:BEGINNING]) for prompt in drawn}) == 200


def test_what_follows_the_beginning_is_the_text_over_and_over() -> None:
    assert FreshPrompts([1, 2, 3], seed=0).next(BEGINNING + 7)[BEGINNING:] == [1, 2, 3, 1, 2, 3, 1]


def test_a_seed_says_which_prompts_come() -> None:
    tokens = range(100)
    assert FreshPrompts(tokens, seed=7).next(50) == FreshPrompts(tokens, seed=7).next(50)
    assert FreshPrompts(tokens, seed=7).next(50) != FreshPrompts(tokens, seed=8).next(50)
