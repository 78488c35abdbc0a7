"""The experts of torch's operators: a row has the same bits next to any other rows, and the values of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from motet.engines.native.step.padded_experts import compute_experts

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "experts_implementation": "eager",
}


@pytest.fixture(params=[MixtralExperts, GptOssExperts])
def experts(request: pytest.FixtureRequest) -> nn.Module:
    """Experts with concatenated weights, and experts with transposed weights and biases."""
    config = (MixtralConfig if request.param is MixtralExperts else GptOssConfig)(**SIZES)
    torch.manual_seed(0)
    module: nn.Module = request.param(config)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.2)
    return module.requires_grad_(False)


def routed(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random rows, their experts except the last expert, and the factors."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(rows, 7, generator=generator).argsort(dim=1)[:, :3]
    return torch.randn(rows, 64, generator=generator), chosen, torch.rand(rows, 3, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_any_rows(experts: nn.Module, dtype: torch.dtype) -> None:
    inputs, chosen, weights = routed(64)
    inputs = inputs.to(dtype)
    together = compute_experts(experts.to(dtype), inputs, chosen, weights)
    for begin, end in ((0, 1), (5, 12), (12, 64)):
        alone = compute_experts(experts, inputs[begin:end], chosen[begin:end], weights[begin:end])
        assert torch.equal(alone, together[begin:end])


def test_results_are_those_of_transformers(experts: nn.Module) -> None:
    given = routed(30)
    torch.testing.assert_close(compute_experts(experts, *given), experts(*given), atol=1e-5, rtol=1e-5)
