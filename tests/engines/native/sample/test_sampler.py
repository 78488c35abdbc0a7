"""Each rule of sampling against the plain reference, and its edge cases."""

import numpy as np
import pytest
import torch

from motet.engines.native.sample.lanes import Sampled, SampleRow
from motet.engines.native.sample.sampler import Sampler
from motet.types import SamplingParams
from tests.engines.native.sample.parameter_sets import PARAMETER_SETS
from tests.engines.native.sample.reference import Past, Row, token_of, weights
from tests.pairwise import each_once

CPU = torch.device("cpu")
VOCAB = 1000


def logits_of(seed: int, rows: int = 1, *, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def float64(row: torch.Tensor) -> Row:
    array: Row = row.double().numpy()
    return array


def sampled_ids(logits: torch.Tensor, params: SamplingParams, pasts: list[Past]) -> list[int]:
    """Samples one token for each of `pasts`, all from the first row."""
    rows = [past.sample_row(0, params) for past in pasts]
    return [sampled.token_id for sampled in Sampler(logits.shape[1], CPU).sample(logits, rows)]


def expected(logits: torch.Tensor, params: SamplingParams, pasts: list[Past]) -> list[int]:
    return [token_of(weights(float64(logits[0]), params, past), past.uniform) for past in pasts]


@pytest.mark.parametrize("params", PARAMETER_SETS.values(), ids=PARAMETER_SETS.keys())
def test_tokens_equal_those_of_the_plain_reference(params: SamplingParams) -> None:
    pasts = [Past(seed, prompt=range(100, 150), output_tokens=(120, 7, 7, 900)) for seed in range(100)]
    logits = logits_of(1)
    assert sampled_ids(logits, params, pasts) == expected(logits, params, pasts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_may_have_any_float_type(dtype: torch.dtype) -> None:
    logits = logits_of(2).bfloat16().to(dtype)
    params, pasts = SamplingParams(max_tokens=9, top_k=30, top_p=0.8), [Past(seed) for seed in range(100)]
    assert sampled_ids(logits, params, pasts) == expected(logits, params, pasts)


def test_sampling_does_not_change_the_logits() -> None:
    logits = logits_of(3, vocab=1024)
    before = logits.clone()
    for params in PARAMETER_SETS.values():
        sampled_ids(logits, params, [Past(output_tokens=(5, 5))])
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_among_equals_and_ignores_filters() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [700, 300, 900]] = 4.0
    params = SamplingParams(max_tokens=9, temperature=0.0, top_k=1, top_p=0.01, min_p=1.0)
    assert sampled_ids(logits, params, [Past()]) == [300]
    banned = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={300: -0.5, 700: -1.0})
    assert sampled_ids(logits, banned, [Past()]) == [900]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9, top_k=1),
        SamplingParams(max_tokens=9, top_p=1e-9),
        SamplingParams(max_tokens=9, min_p=1.0, top_p=0.9999),
        SamplingParams(max_tokens=9, temperature=1e-30),
        SamplingParams(max_tokens=9, temperature=5e-324, top_k=7),
    ],
)
def test_the_narrowest_filter_and_the_coldest_temperature_are_greedy(params: SamplingParams) -> None:
    logits = logits_of(4)
    assert set(sampled_ids(logits, params, [Past(seed) for seed in range(50)])) == {int(logits.argmax())}


def test_top_k_keeps_exactly_k_the_lower_ids_among_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 500] = 0.5
    sampled = sampled_ids(logits, SamplingParams(max_tokens=9, top_k=4), [Past(seed) for seed in range(200)])
    assert set(sampled) == {0, 1, 2, 500}


@pytest.mark.slow
def test_top_p_keeps_the_fewest_tokens_that_reach_it_the_lower_ids_among_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    sampled = sampled_ids(logits, SamplingParams(max_tokens=9, top_p=0.0995), [Past(seed) for seed in range(2000)])
    assert set(sampled) == set(range(100))


def test_top_p_stops_at_the_token_that_reaches_it_exactly() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [200, 600]] = 1.0  # one half each
    assert set(sampled_ids(logits, SamplingParams(max_tokens=9, top_p=0.5), [Past(seed) for seed in range(50)])) == {
        200
    }


def test_min_p_keeps_all_equals() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, [1, 500, 999]] = torch.tensor([2.0, 1.0, 1.0])
    pasts = [Past(seed) for seed in range(200)]
    assert set(sampled_ids(logits, SamplingParams(max_tokens=9, min_p=0.36), pasts)) == {1, 500, 999}
    assert set(sampled_ids(logits, SamplingParams(max_tokens=9, min_p=0.37), pasts)) == {1}
    assert set(sampled_ids(logits, SamplingParams(max_tokens=9, min_p=0.36, top_k=900), pasts)) == {1, 500, 999}
    assert set(sampled_ids(logits, SamplingParams(max_tokens=9, min_p=0.37, top_k=900), pasts)) == {1}


def test_no_ending_token_is_sampled_before_min_tokens() -> None:
    logits = logits_of(5)
    logits[0, [0, 8]] = 50.0
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(8,))
    early = sampled_ids(logits, params, [Past(seed, output_tokens=(3,)) for seed in range(50)])
    assert not {0, 8} & set(early)
    due = sampled_ids(logits, params, [Past(seed, output_tokens=(3, 3)) for seed in range(50)])
    assert set(due) == {0, 8}


def test_no_token_that_is_not_allowed_is_sampled() -> None:
    logits = logits_of(8)
    logits[0, 500] = 90.0
    params = SamplingParams(max_tokens=9, temperature=2.0, allowed_token_ids=(3, 0, VOCAB + 3))
    assert set(sampled_ids(logits, params, [Past(seed) for seed in range(50)])) == {0, 3}


def test_allowed_tokens_that_all_end_a_choice_win_over_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=(8,), allowed_token_ids=(0, 8))
    assert set(sampled_ids(torch.zeros(1, VOCAB), params, [Past(seed) for seed in range(50)])) == {0, 8}


def test_ids_without_a_logit_are_ignored() -> None:
    logits = logits_of(6)
    params = SamplingParams(max_tokens=9, min_tokens=2, logit_bias={VOCAB + 3: 9.0}, repetition_penalty=1.2)
    past = Past(4, prompt=(1, VOCAB + 7), eos_token_ids=(VOCAB, 2**31 - 1))
    plain = SamplingParams(max_tokens=9, repetition_penalty=1.2)
    assert sampled_ids(logits, params, [past]) == sampled_ids(logits, plain, [Past(4, prompt=(1, 1))])


@pytest.mark.parametrize(
    ("value", "params"),
    each_once(
        [torch.nan, -torch.nan, torch.inf], [pytest.param(params, id=name) for name, params in PARAMETER_SETS.items()]
    ),
)
def test_a_row_that_is_not_finite_is_flagged_and_its_neighbours_are_unchanged(
    value: float, params: SamplingParams
) -> None:
    params = SamplingParams(**{**{f: getattr(params, f) for f in params.__struct_fields__}, "logprobs": 2})
    good = logits_of(7, rows=3)
    bad = good.clone()
    bad[1, 777] = value
    rows = [Past(seed, output_tokens=(2,)).sample_row(row, params) for row in range(3) for seed in range(4)]
    sampler = Sampler(VOCAB, CPU)
    before, after = sampler.sample(good, rows), sampler.sample(bad, rows)
    assert [sampled.finite for sampled in after] == [True] * 4 + [False] * 4 + [True] * 4
    assert [sampled.logprob for sampled in after[4:8]] == [None] * 4
    assert after[:4] + after[8:] == before[:4] + before[8:]
    assert sampler.sample(good, rows) == before, "a bad step left something behind"


def test_a_row_of_only_minus_infinity_is_flagged_and_one_with_some_is_not() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[1, [4, 5]] = 0.0
    for params in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, top_p=0.9), PARAMETER_SETS["greedy"]):
        none, some = Sampler(VOCAB, CPU).sample(logits, [Past().sample_row(row, params) for row in (0, 1)])
        assert not none.finite
        assert some.finite
        assert some.token_id in {4, 5}


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(VOCAB, CPU).sample(logits_of(8), []) == []


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 256, 257, 513])
def test_small_and_odd_vocabularies_are_sampled_right(vocab: int) -> None:
    logits = logits_of(9, vocab=vocab)
    pasts = [Past(seed, prompt=(0,)) for seed in range(40)]
    for params in (
        PARAMETER_SETS["plain"],
        PARAMETER_SETS["all filters"],
        PARAMETER_SETS["greedy"],
        PARAMETER_SETS["min_p"],
    ):
        assert sampled_ids(logits, params, pasts) == expected(logits, params, pasts)


def test_more_choices_than_fit_the_scratch_memory_sample_the_same_tokens() -> None:
    """The scratch memory holds 42 rows of this vocabulary."""
    logits = logits_of(10, rows=100, vocab=49_152, spread=3.0).bfloat16()
    kinds = [PARAMETER_SETS["plain"], PARAMETER_SETS["all filters"], PARAMETER_SETS["greedy"]]
    rows = [Past(row, prompt=(5,)).sample_row(row, kinds[row % 3]) for row in range(100)]
    together = Sampler(49_152, CPU).sample(logits, rows)
    for row in (0, 1, 2, 41, 42, 43, 97, 98, 99):
        assert together[row] == Sampler(49_152, CPU).sample(logits, [rows[row]])[0]


def test_a_running_choice_samples_the_same_tokens_as_one_resumed_at_each_token() -> None:
    params = SamplingParams(max_tokens=40, repetition_penalty=1.2, frequency_penalty=0.4, min_tokens=20, top_p=0.9)
    logits = logits_of(11, rows=40)
    state = Past(5, prompt=(4, 5)).sample_row(0, params).state
    sampler = Sampler(VOCAB, CPU)
    output_tokens: list[int] = []
    for step in range(40):
        [running] = sampler.sample(logits, [SampleRow(step, state, 2 + step)])
        [resumed] = sampler.sample(
            logits, [Past(5, prompt=(4, 5), output_tokens=tuple(output_tokens)).sample_row(step, params)]
        )
        assert running == resumed == Sampled(running.token_id, None)
        state.append(running.token_id)
        output_tokens.append(running.token_id)
    assert len(set(output_tokens)) > 20


def test_choices_that_fork_from_one_row_sample_what_each_seed_samples_alone() -> None:
    """The n choices have the seeds s + i."""
    logits = logits_of(12)
    params = SamplingParams(max_tokens=9)
    fork = sampled_ids(logits, params, [Past(2**64 - 3 + i if i < 3 else i - 3) for i in range(32)])
    alone = [sampled_ids(logits, params, [Past((2**64 - 3 + i) % 2**64)])[0] for i in range(32)]
    assert fork == alone
    assert len(set(fork)) > 10


def test_of_previous_tokens_only_their_number_changes_the_sampled_token() -> None:
    logits = logits_of(13)
    params = SamplingParams(max_tokens=9)
    by_position = sampled_ids(logits, params, [Past(1, prompt=(1,) * length) for length in range(1, 60)])
    assert len(set(by_position)) > 20
    other_tokens = sampled_ids(
        logits, params, [Past(1, prompt=(2,), output_tokens=(3,) * length) for length in range(59)]
    )
    assert np.array_equal(by_position, other_tokens)


def test_a_used_sampler_samples_the_same_tokens_as_a_new_one() -> None:
    """A sampler keeps the parameters of the last group."""
    sampler, logits = Sampler(VOCAB, CPU), logits_of(13, rows=8)
    kinds = [PARAMETER_SETS["cold"], PARAMETER_SETS["hot"], PARAMETER_SETS["all filters"], PARAMETER_SETS["min_p"]]
    steps = [(kind, n) for n in (1, 8, 3) for kind in (*kinds, kinds[0], kinds[0])]
    for kind, n in steps:
        rows = [Past(row).sample_row(row, kind) for row in range(n)]
        assert sampler.sample(logits, rows) == Sampler(VOCAB, CPU).sample(logits, rows)
