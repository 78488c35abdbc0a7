from collections.abc import ItemsView
from typing import Any

import torch

from motet.engines.native.sample.edits import apply_edits
from motet.engines.native.sample.state import BadWords, ChoiceSampling, PromptTokens, TokenBias, TokenCounts
from motet.types import SamplingParams


def counted(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def choice(
    params: SamplingParams, output_tokens: tuple[int, ...] = (), prompt: tuple[int, ...] = (5, 6, 5)
) -> ChoiceSampling:
    return ChoiceSampling(
        params, seed=3, prompt=PromptTokens(prompt), eos_token_ids=(0, 1), output_tokens=output_tokens
    )


def test_output_tokens_are_counted_and_prompt_tokens_are_known_with_count_zero() -> None:
    counts = TokenCounts(PromptTokens((5, 6, 5)), output_tokens=(7, 6, 7))
    assert counted(counts) == {5: 0, 6: 1, 7: 2}


def test_counts_grow_beyond_their_initial_capacity() -> None:
    counts = TokenCounts(PromptTokens(range(70)), output_tokens=())
    for token_id in range(500):
        counts.add(token_id)
        counts.add(token_id)
    assert counted(counts) == dict.fromkeys(range(500), 2)


def test_choices_of_one_prompt_have_separate_counts() -> None:
    prompt = PromptTokens((5, 6, 5))
    one, other = TokenCounts(prompt, output_tokens=(7, 5)), TokenCounts(prompt, output_tokens=(8,))
    other.add(6)
    assert counted(one) == {5: 1, 6: 0, 7: 1}
    assert counted(other) == {5: 0, 6: 1, 8: 1}


def test_a_resumed_choice_equals_one_that_sampled_the_tokens_itself() -> None:
    params = SamplingParams(max_tokens=9, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=3)
    fresh = choice(params)
    for token_id in (7, 6, 7):
        fresh.append(token_id)
    resumed = choice(params, output_tokens=(7, 6, 7))
    assert fresh.counts is not None
    assert resumed.counts is not None
    assert counted(fresh.counts) == counted(resumed.counts)
    assert fresh.num_output_tokens == resumed.num_output_tokens == 3
    assert fresh.forbidden_ids() == resumed.forbidden_ids() == ()


def test_nothing_is_counted_without_a_penalty() -> None:
    assert choice(SamplingParams(max_tokens=9, logit_bias={1: 2.0}, min_tokens=2)).counts is None


def test_the_prompt_is_counted_for_the_repetition_penalty_only() -> None:
    repetition = choice(SamplingParams(max_tokens=9, repetition_penalty=1.2)).counts
    presence = choice(SamplingParams(max_tokens=9, presence_penalty=1.0)).counts
    assert repetition is not None
    assert presence is not None
    assert counted(repetition) == {5: 0, 6: 0}
    assert counted(presence) == {}


def test_ending_tokens_are_forbidden_until_min_tokens_are_generated() -> None:
    state = choice(SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(8,)))
    assert state.forbidden_ids() == (0, 1, 8)
    state.append(4)
    assert state.forbidden_ids() == (0, 1, 8)
    assert state.has_edits
    state.append(4)
    assert state.forbidden_ids() == ()
    assert not state.has_edits


def test_with_ignore_eos_only_the_stop_tokens_are_forbidden() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(8,), ignore_eos=True)
    assert choice(params).forbidden_ids() == (8,)


class Biases(dict[int, float]):
    """Counts the calls of `items`."""

    num_reads = 0

    def items(self) -> ItemsView[int, float]:  # type: ignore[override]
        self.num_reads += 1
        return super().items()


def test_choices_of_a_group_go_through_its_biases_once_and_change_no_other_bit() -> None:
    biases = Biases({token_id: 0.1 * token_id for token_id in range(3, 100)} | {400: 9.0})
    params, plain = SamplingParams(max_tokens=9, logit_bias=biases), choice(SamplingParams(max_tokens=9))
    shared = TokenBias(params)
    one, other = (
        ChoiceSampling(params, seed=seed, prompt=PromptTokens(()), eos_token_ids=(), bias=shared) for seed in (1, 2)
    )
    for states in ([one, other], [one, plain, other], [plain, other]):
        x = torch.randn(len(states), 320)
        x[:, :3] = torch.tensor([-0.0, 0.0, -torch.inf])
        x[:, 5] = -torch.inf
        expected = x.clone()
        for lane, state in enumerate(states):
            for token_id in range(3, 100) if state is not plain else ():
                expected[lane, token_id] += torch.tensor(biases[token_id], dtype=torch.float32)
        apply_edits(x, states, vocab_size=300)
        assert torch.equal(x.view(torch.int32), expected.view(torch.int32))
    assert biases.num_reads == 1


def test_a_bad_word_is_not_completed_after_the_tokens_before_it() -> None:
    state = choice(SamplingParams(max_tokens=9, bad_word_ids=((4,), (5, 6), (5, 7), (6, 5, 8), (5, 5, 5))))
    assert state.has_edits
    assert state.forbidden_ids() == ()
    seen = []
    for token_id in (5, 6, 5, 9, 5, 5):
        ahead = state.after(token_id)
        state.append(token_id)
        assert ahead is not None
        assert ahead.forbidden_ids() == state.forbidden_ids()
        seen.append({*state.forbidden_ids()})
    assert seen == [{6, 7}, set(), {6, 7, 8}, set(), {6, 7}, {6, 7, 5}]
    resumed = choice(state.params, output_tokens=(5, 6, 5))
    assert {*resumed.forbidden_ids()} == {6, 7, 8}


def test_allowed_tokens_that_all_complete_bad_words_stay_allowed() -> None:
    params = SamplingParams(max_tokens=9, allowed_token_ids=(5, 6), bad_word_ids=((5, 5), (5, 6)))
    assert choice(params, output_tokens=(5,)).forbidden_ids() == ()
    params = SamplingParams(max_tokens=9, allowed_token_ids=(5, 6, 7), bad_word_ids=((5, 5), (5, 6)))
    assert choice(params, output_tokens=(5,)).forbidden_ids() == (5, 6)


def test_few_bad_words_are_compared_with_an_answer() -> None:
    """Regression: words of 127 lengths took 50 microseconds for each token of each choice."""
    words = BadWords([tuple(range(length)) for length in range(2, 129)])
    compared: list[int] = []

    class Recent(tuple[int, ...]):
        def __getitem__(self, part: Any) -> Any:
            compared.extend([1] * isinstance(part, slice))
            return super().__getitem__(part)

    assert words.after(Recent(range(1000, 1127))) == ()
    assert words.after(Recent(range(50))) == (50,)
    assert words.after(Recent()) == ()
    assert len(compared) == 1
