"""Sampling directly from a step's logits gives the same tokens as torch's operators, for any shape of a row."""

from collections.abc import Callable, Sequence

import pytest
import torch

from motet.engines.native.sample.compiled_sampling import CompiledSampling
from motet.engines.native.sample.filters import TorchFilters
from motet.engines.native.sample.lanes import Sampled, SampleRow
from motet.engines.native.sample.sampler import Sampler
from motet.types import LogprobsMode, SamplingParams
from tests.engines.native.sample.parameter_sets import PARAMETER_SETS
from tests.engines.native.sample.reference import Past
from tests.kernels import KERNEL_KINDS, kernels_of

CPU = torch.device("cpu")
UNMODIFIED = {
    "open": SamplingParams(max_tokens=9, logprobs=4),
    "cold": SamplingParams(max_tokens=9, temperature=1e-3, logprobs=0),
    "hot": SamplingParams(max_tokens=9, temperature=1.7, logprobs=20),
    "min_p": SamplingParams(max_tokens=9, temperature=0.8, min_p=0.1, logprobs=1),
    "greedy": SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, logprob_token_ids=(3, 0, 99)),
    "nothing scored": SamplingParams(max_tokens=9),
    "top_k": SamplingParams(max_tokens=9, top_k=30, logprobs=1),
    "top_p": SamplingParams(max_tokens=9, temperature=0.6, top_p=0.95, logprobs=0),
    "top_k, top_p and min_p": SamplingParams(max_tokens=9, temperature=1.3, top_k=90, top_p=0.8, min_p=0.02),
}


Made = Callable[[int], CompiledSampling]


@pytest.fixture(params=KERNEL_KINDS)
def made(request: pytest.FixtureRequest) -> Made:
    kernels = kernels_of(request.param)
    return lambda vocab_size: CompiledSampling(vocab_size, kernels)


def logits_of(vocab: int, spread: float) -> torch.Tensor:
    return spread * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))


def with_torch(vocab: int, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    return Sampler(vocab, CPU, filters=TorchFilters(vocab)).sample(logits, rows)


def assert_same(
    got: Sequence[Sampled], expected: Sequence[Sampled], *, logits: torch.Tensor, rows: Sequence[SampleRow]
) -> None:
    """Log-probabilities are compared with those in float64: torch's are wrong by up to 5e-6."""
    exact = torch.log_softmax(logits.double(), -1)
    for row, one, other in zip(rows, got, expected, strict=True):
        assert (one.token_id, one.finite, one.logprob is None) == (other.token_id, other.finite, other.logprob is None)
        if one.logprob is not None and other.logprob is not None:
            assert one.logprob.rank == other.logprob.rank
            scored = {one.token_id: one.logprob.logprob, **dict(one.logprob.top)}
            assert [*scored] == [*{other.token_id: 0.0, **dict(other.logprob.top)}]
            assert [*scored.values()] == pytest.approx(exact[row.logits_row, [*scored]].tolist(), abs=1e-6)


@pytest.mark.parametrize("vocab", [100, 256, 1000, 5003, 49_152])
@pytest.mark.parametrize("spread", [0.05, 4.0])
def test_tokens_and_their_scores_are_torchs(made: Made, vocab: int, spread: float) -> None:
    logits = logits_of(vocab, spread)
    rows = [Past(seed).sample_row(seed % 3, params) for params in UNMODIFIED.values() for seed in range(20)]
    sampling = made(vocab)
    assert sampling.directly_sampled(rows) == [*range(len(rows))]
    got = Sampler(vocab, CPU, filters=sampling).sample(logits, rows)
    assert_same(got, with_torch(vocab, logits, rows), logits=logits, rows=rows)


def test_the_first_of_equal_logits_is_the_best(made: Made) -> None:
    logits = torch.full((1, 700), -2.0)
    logits[0, [650, 300, 310, 699]] = torch.tensor([1.0, 0.0, -0.0, 1.0])
    rows = [Past(0).sample_row(0, SamplingParams(max_tokens=9, temperature=0.0, logprobs=5))]
    [sampled] = Sampler(700, CPU, filters=made(700)).sample(logits, rows)
    assert sampled.token_id == 650
    assert sampled.logprob is not None
    assert [token_id for token_id, _ in sampled.logprob.top] == [650, 699, 300, 310, 0]


def test_all_tokens_can_be_listed_though_most_are_impossible(made: Made) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 299]] = torch.tensor([0.5, 1.5])
    rows = [Past(3).sample_row(0, SamplingParams(max_tokens=9, logprobs=300))]
    [sampled] = Sampler(300, CPU, filters=made(300)).sample(logits, rows)
    assert sampled.logprob is not None
    assert sampled.logprob.rank == {299: 1, 7: 2}[sampled.token_id]
    others = [token_id for token_id in range(300) if token_id not in {7, 299}]
    assert [token_id for token_id, _ in sampled.logprob.top] == [299, 7, *others]


def test_a_row_that_is_not_a_distribution_leaves_other_rows_unchanged(made: Made) -> None:
    good = logits_of(500, 2.0)[:1]
    half = good.clone()
    half[0, 499] = torch.nan
    broken = [torch.full((1, 500), value) for value in (torch.nan, torch.inf, -torch.inf)]
    logits = torch.cat([*broken, half, good])
    for params in UNMODIFIED.values():
        rows = [Past(seed).sample_row(row, params) for row in range(5) for seed in (1, 2)]
        got = Sampler(500, CPU, filters=made(500)).sample(logits, rows)
        assert [one.finite for one in got] == [False] * 8 + [True] * 2
        assert all(one.logprob is None for one in got[:8])
        assert_same(got[8:], with_torch(500, logits, rows[8:]), logits=logits, rows=rows[8:])


def test_choices_whose_logits_are_modified_are_not_sampled_directly(made: Made) -> None:
    parameter_sets = {
        **PARAMETER_SETS,
        "processed": SamplingParams(max_tokens=9, logprobs=1, logprobs_mode=LogprobsMode.PROCESSED),
    }
    rows = [Past(place).sample_row(0, params) for place, params in enumerate(parameter_sets.values())]
    left = {name for name, row in zip(parameter_sets, rows, strict=True) if row.state.has_edits} | {"processed"}
    direct = {[*parameter_sets][place] for place in made(3000).directly_sampled(rows)}
    assert direct == parameter_sets.keys() - left
    assert len(direct) == 13
