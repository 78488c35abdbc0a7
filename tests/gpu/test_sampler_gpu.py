"""On CUDA, the sampler samples the same tokens as on the CPU from the same float32 logits."""

from collections.abc import Sequence

import pytest
import torch

from motet.engines.native.sample.lanes import Sampled, SampleRow
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.sample.top_logprobs import prompt_logprobs
from motet.types import SamplingParams, TokenLogprob
from tests.devices import ON_GPU
from tests.engines.native.sample.parameter_sets import PARAMETER_SETS
from tests.engines.native.sample.reference import Past

pytestmark = list(ON_GPU)

VOCAB = 49_152
ROWS = 64


def logits_of(seed: int, rows: int = ROWS) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(logits: torch.Tensor, rows: list[SampleRow], device: str) -> list[Sampled]:
    return Sampler(VOCAB, torch.device(device)).sample(logits.to(device), rows)


def assert_same(on_cpu: list[Sampled], on_gpu: list[Sampled]) -> None:
    assert [sampled.token_id for sampled in on_gpu] == [sampled.token_id for sampled in on_cpu]
    assert [sampled.finite for sampled in on_gpu] == [sampled.finite for sampled in on_cpu]
    assert_same_scores([sampled.logprob for sampled in on_cpu], [sampled.logprob for sampled in on_gpu])


def assert_same_scores(on_cpu: Sequence[TokenLogprob | None], on_gpu: Sequence[TokenLogprob | None]) -> None:
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert (cpu is None) == (gpu is None)
        if cpu is not None and gpu is not None:
            assert (gpu.token_id, gpu.rank) == (cpu.token_id, cpu.rank)
            assert gpu.logprob == pytest.approx(cpu.logprob, abs=1e-5)
            assert [token_id for token_id, _ in gpu.top] == [token_id for token_id, _ in cpu.top]


@pytest.mark.parametrize("params", PARAMETER_SETS.values(), ids=PARAMETER_SETS.keys())
def test_cuda_samples_the_same_tokens_as_the_cpu(params: SamplingParams) -> None:
    logits = logits_of(0)
    pasts = [Past(seed, prompt=range(100), output_tokens=(7, 7, 900)) for seed in range(4 * ROWS)]
    rows = [past.sample_row(place % ROWS, params) for place, past in enumerate(pasts)]
    assert_same(sample(logits, rows, "cpu"), sample(logits, rows, "cuda"))


def test_cuda_samples_a_mixed_step_like_each_choice_alone() -> None:
    logits = logits_of(1)
    kinds = list(PARAMETER_SETS.values())
    rows = [Past(row, output_tokens=(3,)).sample_row(row, kinds[row % len(kinds)]) for row in range(ROWS)]
    together = sample(logits, rows, "cuda")
    for row in range(ROWS):
        alone = sample(logits[row : row + 1], [SampleRow(0, rows[row].state, rows[row].position)], "cuda")
        assert alone[0].token_id == together[row].token_id


def test_of_equal_logits_the_lower_id_wins_on_cuda_too() -> None:
    logits = logits_of(2).bfloat16()
    params = SamplingParams(max_tokens=9, top_k=20, logprobs=20)
    rows = [Past(row).sample_row(row, params) for row in range(ROWS)]
    assert_same(sample(logits, rows, "cpu"), sample(logits, rows, "cuda"))


def test_a_row_that_is_not_finite_is_flagged_on_cuda() -> None:
    logits = logits_of(3, rows=2)
    logits[0, 777] = torch.nan
    for params in PARAMETER_SETS.values():
        bad, good = sample(logits, [Past().sample_row(row, params) for row in (0, 1)], "cuda")
        assert not bad.finite
        assert good.finite


def test_prompt_logprobs_on_cuda_are_those_of_the_cpu() -> None:
    logits, targets = logits_of(4), list(range(0, 10 * ROWS, 10))
    assert_same_scores(prompt_logprobs(logits, targets, k=3), prompt_logprobs(logits.cuda(), targets, k=3))
