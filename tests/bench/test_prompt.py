"""Prompts that no prefix cache knows."""

from bench.client.prompts import BEGINNING, FreshPrompts


def test_no_two_prompts_begin_alike_whatever_their_lengths() -> None:
    fresh = FreshPrompts([1, 2, 1], seed=0)
    drawn = [fresh.next(length) for length in (9, 20) * 100]  # there are 256 possible beginnings
    assert [len(prompt) for prompt in drawn] == [9, 20] * 100
    assert len({tuple(prompt[:BEGINNING]) for prompt in drawn}) == 200


def test_after_the_beginning_the_text_repeats() -> None:
    assert FreshPrompts([1, 2, 3], seed=0).next(BEGINNING + 7)[BEGINNING:] == [1, 2, 3, 1, 2, 3, 1]


def test_a_seed_determines_the_prompts() -> None:
    tokens = range(100)
    assert FreshPrompts(tokens, seed=7).next(50) == FreshPrompts(tokens, seed=7).next(50)
    assert FreshPrompts(tokens, seed=7).next(50) != FreshPrompts(tokens, seed=8).next(50)
