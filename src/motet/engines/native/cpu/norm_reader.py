"""Recognizes norms and activations by what they compute for random numbers, not by their names."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from motet.engines.native import compiled_kernels as c
from motet.engines.native.cpu.model_trace import Call

CLOSE = 0.03
"""Maximum relative difference of numbers that are equal apart from the rounding of bfloat16."""

ACTIVATIONS = {
    "silu": c.SILU,
    "gelu_pytorch_tanh": c.GELU_TANH,
    "gelu": c.GELU,
    "quick_gelu": c.QUICK_GELU,
    "relu": c.RELU,
    "relu2": c.RELU_SQUARED,
    "relu6": c.RELU6,
    "tanh": c.TANH,
    "sigmoid": c.SIGMOID,
    "linear": c.IDENTITY,
    "leaky_relu": c.LEAKY_RELU,
    "mish": c.MISH,
    "laplace": c.LAPLACE,
    "gelu_10": c.CLIPPED_GELU,
    "hardswish": c.HARD_SWISH,
}
"""The kernels' code for each function, by a name that transformers has for it. Other names are recognized as well."""

EPSILON_NAMES = "variance_epsilon", "eps", "epsilon"
DEFAULT_EPSILON = 1e-5
"""Epsilon of norms without such an attribute, as in `F.layer_norm`."""


class StructureError(Exception):
    """Raised for a part of a model that the kernels do not implement. The message names the part, with an article."""


@dataclass(frozen=True, eq=False)
class NormRead:
    """A norm: (x - mean) / deviation * (weight + offset) + bias."""

    module: nn.Module
    width: int
    """Number of elements that are normalized together."""
    centered: bool
    """True for LayerNorm, which subtracts the mean."""
    offset: float
    epsilon: float

    @property
    def weight(self) -> Tensor | None:
        return getattr(self.module, "weight", None)

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.module, "bias", None)

    @property
    def stride(self) -> int:
        """Distance between the weights of two heads; 0 if all heads have the same weights."""
        return self.width if self.weight is not None and self.weight.numel() > self.width else 0


@torch.inference_mode()
def read_norm(call: Call) -> NormRead:
    """Raises StructureError if a norm computes something else. Epsilon matters for the smaller numbers."""
    module, width = call.module, call.input.shape[-1]
    weight = getattr(module, "weight", None)
    shape = (width,) if weight is None else tuple(weight.shape)
    if shape[-1] != width:
        raise StructureError(f"the norm {type(module).__name__}")
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)) + 0.5
    x = torch.cat([x, x * 1e-3]).to(call.input.device, call.input.dtype)
    found = module(x)
    named = (getattr(module, name, None) for name in EPSILON_NAMES)
    epsilon = next((float(one) for one in named if one is not None), DEFAULT_EPSILON)
    candidates = [
        NormRead(module, width, centered, offset, epsilon) for centered, offset in product((False, True), (0.0, 1.0))
    ]
    best = min(candidates, key=lambda norm: difference(_normed(norm, x), found))
    if difference(_normed(best, x), found) > CLOSE:
        raise StructureError(f"the norm {type(module).__name__}")
    return best


def _normed(norm: NormRead, x: Tensor) -> Tensor:
    x = x.float()
    if norm.centered:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon)
    y = y if norm.weight is None else y * (norm.weight.float() + norm.offset)
    return y if norm.bias is None else y + norm.bias.float()


@torch.inference_mode()
def activation_code(module: nn.Module) -> int:
    """Returns the kernels' code for an activation. Raises StructureError if they do not have it."""
    name = type(module).__name__
    if next(module.parameters(), None) is None:
        x = torch.linspace(-12, 12, 481)
        found = module(x)
        for known, code in ACTIVATIONS.items():
            function: Callable[[Tensor], Tensor] = ACT2FN[known]
            if torch.allclose(function(x), found, rtol=1e-5, atol=1e-5):
                return code
    raise StructureError(f"the activation {name}")


def difference(found: Tensor, expected: Tensor) -> float:
    """Returns the relative difference of two tensors of the same shape."""
    found, expected = found.float(), expected.float()
    scale = float(expected.square().mean().sqrt())
    return float((found - expected).square().mean().sqrt()) / (scale or 1.0)


def equal(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors contain the same numbers, possibly in another shape."""
    return one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten())


def close(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors are equal apart from rounding."""
    return one.numel() == other.numel() and difference(one.flatten(), other.flatten()) < CLOSE
