"""From a step's inputs to its tokens, the host never waits for a value of the device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.core import EngineCore
from motet.engines.native.cuda.launch import CosSin, CudaStep, Norms
from motet.engines.native.sample.filters import TorchFilters
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.step.inputs import StepInputs
from motet.types import SamplingParams
from tests.engines.native.cuda.cpu_runner import Repeating, cuda_parts
from tests.engines.native.cuda.plain_operators import PlainOperators
from tests.engines.native.cuda.waits import Waits
from tests.engines.native.drive import group, prompt_of, run
from tests.engines.native.recorder import WrappedRunner
from tests.engines.native.sample.parameter_sets import PARAMETER_SETS
from tests.engines.native.sample.reference import Past
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.slow


def test_operations_that_wait_for_the_device_are_found() -> None:
    x = torch.arange(4.0)
    with Waits() as waits:
        assert x[1] > 0
        x[x > 2] = 0
        x.nonzero()
        assert x[torch.tensor([1, 2])].sum().item() > 0
    assert len(waits.found) == 4


@pytest.mark.parametrize("params", PARAMETER_SETS.values(), ids=PARAMETER_SETS.keys())
def test_sampling_does_not_wait_for_the_device(params: SamplingParams) -> None:
    logits = 3 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    rows = [Past(seed, prompt=range(100), output_tokens=(7, 7, 900)).sample_row(seed % 8, params) for seed in range(32)]
    with Waits() as waits:
        Sampler(1000, torch.device("cpu"), filters=TorchFilters(1000)).sample(logits, rows)
    assert waits.found == []


class WithoutAttention(PlainOperators):
    """Operators that skip attention: in plain torch it waits, in kernels it does not."""

    def rotate(
        self, layer: int, projected: torch.Tensor, *, cos_sin: CosSin, norms: Norms | None, step: CudaStep
    ) -> torch.Tensor:
        heads, head_dim = step.geometry.num_heads, step.storage.keys.shape[-1]
        return projected.view(len(projected), -1, head_dim)[:, :heads]

    def attend(self, layer: int, query: torch.Tensor, *, step: CudaStep, scores: Scores) -> torch.Tensor:
        return query


@pytest.mark.parametrize("recorder", [Repeating(), None], ids=["graphs", "launches"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_does_not_wait_for_the_device(
    family: str, recorder: Repeating | None, tiny: Callable[[str], Path]
) -> None:
    parts = cuda_parts(tiny(family), recorder=recorder, operators=WithoutAttention())
    waits = Waits()

    class Watched(WrappedRunner):
        def run(self, inputs: StepInputs) -> torch.Tensor:
            with waits:
                return super().run(inputs)

    runner = Watched(parts.runner)
    run(EngineCore(parts.info, runner, options=parts.options), [group("g", prompt_of(40), n=3, max_tokens=4)])
    assert waits.found == []
