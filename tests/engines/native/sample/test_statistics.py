"""20,000 draws against the distribution they come from. The seeds are fixed, so these pass always or never."""

import pytest
import torch

from motet.engines.native.sample.sampler import Sampler, SampleRow
from motet.types import SamplingParams
from tests.engines.native.sample.reference import Past, chi_square, chi_square_bound, weights

DRAWS = 20_000
VOCAB = 700
LOGITS = 1.5 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
WAYS = {
    "plain": SamplingParams(max_tokens=9),
    "temperature": SamplingParams(max_tokens=9, temperature=0.6),
    "top_k": SamplingParams(max_tokens=9, top_k=50),
    "top_p": SamplingParams(max_tokens=9, top_p=0.8),
    "min_p": SamplingParams(max_tokens=9, min_p=0.03),
    "all": SamplingParams(max_tokens=9, temperature=1.4, top_k=200, top_p=0.9, min_p=0.05, logit_bias={1: 4.0}),
}


@pytest.mark.parametrize("params", WAYS.values(), ids=WAYS.keys())
def test_draws_of_many_seeds_follow_the_distribution(params: SamplingParams) -> None:
    """The seeds are neighbours, as those of the choices of a group are."""
    check(params, [Past(seed).sample_row(0, params) for seed in range(DRAWS)])


@pytest.mark.parametrize("params", WAYS.values(), ids=WAYS.keys())
def test_draws_of_one_seed_at_many_positions_follow_the_distribution(params: SamplingParams) -> None:
    state = Past(12345).sample_row(0, params).state
    check(params, [SampleRow(0, state, position) for position in range(DRAWS)])


def check(params: SamplingParams, rows: list[SampleRow]) -> None:
    tokens = [sampled.token_id for sampled in Sampler(VOCAB, torch.device("cpu")).sample(LOGITS, rows)]
    statistic, degrees = chi_square(tokens, weights(LOGITS[0].double().numpy(), params))
    assert degrees > 20
    assert statistic < chi_square_bound(degrees)


def test_the_check_itself_notices_a_wrong_distribution() -> None:
    params = SamplingParams(max_tokens=9, temperature=1.05)
    rows = [Past(seed).sample_row(0, params) for seed in range(DRAWS)]
    with pytest.raises(AssertionError):
        check(WAYS["plain"], rows)
