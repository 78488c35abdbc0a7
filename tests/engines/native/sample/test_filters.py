"""The tokens that top-k, top-p and min-p keep, and the sampled token: every implementation of `Filters` against a slow
definition, where it is hardest to find the last token kept."""

import math
from collections.abc import Callable
from fractions import Fraction

import msgspec
import pytest
import torch

from motet.engines.native.compiled_kernels import KINDS
from motet.engines.native.sample.candidates import masses
from motet.engines.native.sample.compiled_sampling import CompiledSampling
from motet.engines.native.sample.filters import Filters, TorchFilters
from motet.engines.native.sample.lanes import Sampled
from motet.engines.native.sample.sampler import Sampler
from motet.types import LogprobsMode, SamplingParams
from tests.engines.native.sample.reference import Past, token_of, weights
from tests.kernels import KERNEL_KINDS, kernels_of

CPU = torch.device("cpu")
VOCAB = 1500
ROUNDING = 4 * 2**-24
"""Maximum error of a sum of probabilities in float32."""
Made = Callable[[int], Sampler]


@pytest.fixture(params=["torch", "torch, all at once", *KERNEL_KINDS])
def made(request: pytest.FixtureRequest) -> Made:
    """Returns samplers with one implementation, for a vocabulary's size."""

    def filters(vocab_size: int) -> Filters:
        if request.param in KINDS:
            return CompiledSampling(vocab_size, kernels_of(request.param))
        return TorchFilters(vocab_size) if request.param == "torch" else TorchFilters(vocab_size, widths=())

    return lambda vocab_size: Sampler(vocab_size, CPU, filters=filters(vocab_size))


def normal(seed: int, spread: float, vocab: int = VOCAB) -> torch.Tensor:
    return spread * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))


def with_best(x: torch.Tensor, best: float) -> torch.Tensor:
    x[0, 700] = best
    return x


def allowed(count: int) -> torch.Tensor:
    """All but a few tokens are -inf."""
    x = torch.full((1, VOCAB), -torch.inf)
    x[0, torch.arange(count) * 7] = normal(5, 1.0)[0, :count]
    return x


LOGITS = {
    "few are likely": normal(0, 4.0),
    "many are likely": normal(1, 0.5),
    "many equal": normal(2, 1.0).bfloat16().float(),
    "nearly all equal": normal(3, 0.01).bfloat16().float() + 1,
    "all equal": torch.zeros(1, VOCAB),
    "the two zeros": torch.where(torch.arange(VOCAB) % 3 == 0, 0.0, -0.0).unsqueeze(0),
    "neighbours in float32": 8 + normal(4, 1e-6),
    "one far above a dense rest": with_best(normal(6, 1e-5), 5.0),
    "far apart": 1e30 * normal(7, 1.0),
    "five allowed": allowed(5),
    "one allowed": allowed(1),
    "hundreds allowed": allowed(200),
}
PARAMS = {
    "top_p": SamplingParams(max_tokens=9, top_p=0.6),
    "a high top_p": SamplingParams(max_tokens=9, top_p=0.999),
    "the highest top_p": SamplingParams(max_tokens=9, top_p=1 - 2**-53),
    "a low top_p": SamplingParams(max_tokens=9, top_p=1e-6),
    "hot, top_p": SamplingParams(max_tokens=9, temperature=1.3, top_p=0.95),
    "cold, top_p": SamplingParams(max_tokens=9, temperature=0.01, top_p=0.95),
    "top_k 100": SamplingParams(max_tokens=9, top_k=100),
    "top_k of nearly all": SamplingParams(max_tokens=9, top_k=VOCAB - 1),
    "top_k, then top_p": SamplingParams(max_tokens=9, temperature=0.9, top_k=600, top_p=0.8),
    "top_p and min_p": SamplingParams(max_tokens=9, temperature=1.7, top_p=0.9, min_p=0.3),
    "top_k and min_p": SamplingParams(max_tokens=9, temperature=0.6, top_k=80, min_p=0.05),
}


def scaled(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return (logits - logits.amax()) / torch.tensor(params.temperature)


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    padded = torch.full((1, 6 * 256), -torch.inf)
    padded[:, :VOCAB] = scaled(logits, params)
    return torch.softmax(padded, -1)


def kept(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Goes through all tokens in their order, and adds up their weights without rounding."""
    values = logits[0].tolist()
    weights_of = [Fraction(weight) for weight in probabilities(logits, params)[0].tolist()]
    front = sorted(range(VOCAB), key=lambda token_id: (-values[token_id], token_id))
    total = Fraction(float(masses(probabilities(logits, params)).sum()))
    if params.top_k:
        front = front[: params.top_k]
        total = Fraction(float(sum(weights_of[token_id] for token_id in front)))
    if params.top_p < 1.0:
        target, mass = float(params.top_p * float(total)), Fraction(0)
        for size, token_id in enumerate(front, 1):
            mass += weights_of[token_id]
            if float(mass) >= target:
                front = front[:size]
                break
    least = torch.tensor(math.log(params.min_p) if params.min_p else -torch.inf)
    above = (scaled(logits, params)[0] >= least).tolist()
    return {token_id for token_id in front if above[token_id] and values[token_id] > -torch.inf}


def sample(sampler: Sampler, logits: torch.Tensor, params: SamplingParams, num_choices: int) -> list[Sampled]:
    return sampler.sample(logits, [Past(seed).sample_row(0, params) for seed in range(num_choices)])


@pytest.mark.slow
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS.keys())
def test_tokens_are_kept_and_sampled_as_in_the_slow_definition(made: Made, logits: torch.Tensor) -> None:
    for name, params in PARAMS.items():
        expected, weights_of = kept(logits, params), probabilities(logits, params)[0].double()
        listing = msgspec.structs.replace(params, logprobs=VOCAB, logprobs_mode=LogprobsMode.PROCESSED)
        [listed] = sample(made(VOCAB), logits, listing, 1)
        assert listed.logprob is not None
        got = {token_id for token_id, logprob in listed.logprob.top if logprob > -torch.inf}
        if name == "the highest top_p":  # the rounding of a sum, whose order depends on the processor, decides
            assert weights_of[list(got ^ expected)].sum() < ROUNDING
        else:
            assert got == expected, name
        left = weights_of[:VOCAB].numpy()
        left[[token_id for token_id in range(VOCAB) if token_id not in got]] = 0.0
        sampled = [one.token_id for one in sample(made(VOCAB), logits, params, 40)]
        assert sampled == [token_of(left, Past(seed).uniform) for seed in range(40)], name


@pytest.mark.parametrize("spread", [1.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thousands_of_kept_tokens_are_sampled_as_in_the_plain_reference(
    made: Made, dtype: torch.dtype, spread: float
) -> None:
    logits = normal(11, spread, 49_152).to(dtype)
    params = SamplingParams(max_tokens=9, temperature=1.3, top_p=0.95)
    expected = weights(logits[0].double().numpy(), params)
    assert (expected > 0).sum() > 4096
    sampled = [one.token_id for one in sample(made(49_152), logits, params, 50)]
    assert sampled == [token_of(expected, Past(seed).uniform) for seed in range(50)]


def test_a_lane_that_is_not_a_distribution_leaves_other_lanes_unchanged(made: Made) -> None:
    good = normal(12, 1.0)
    broken = [torch.full((1, VOCAB), value) for value in (torch.nan, torch.inf, -torch.inf)]
    half = good.clone()
    half[0, 3] = torch.nan
    logits = torch.cat([*broken, good, half])
    for params in PARAMS.values():
        rows = [Past(7).sample_row(row, params) for row in range(5)]
        sampled = made(VOCAB).sample(logits, rows)
        assert [one.finite for one in sampled] == [False, False, False, True, False]
        assert sampled[3] == sample(made(VOCAB), good, params, 8)[7]
