"""Records how a decoder computes a token: every call of a product, a norm, an activation or embeddings, and every call
of attention, in their order.

`model_reader` derives the structure of the model from the numbers of this trace instead of from the names of its parts:
a norm is the norm before attention if its output is the input of the query product. The same token is computed at a few
positions, and attention returns the values, so only RoPE makes the rows differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.step.run import step_attention


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module with one tensor, which returned one tensor."""

    number: int
    """Number of calls before this one."""
    name: str
    module: Any
    input: Tensor
    output: Tensor

    @property
    def is_product(self) -> bool:
        return isinstance(self.module, nn.Linear)

    @property
    def is_norm(self) -> bool:
        return "norm" in type(self.module).__name__.lower()

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, nn.Embedding)

    @property
    def is_other(self) -> bool:
        """True for an activation, and for what the kernels do not have."""
        return not (self.is_product or self.is_norm or self.is_embedding or is_mixture(self.module))


def is_mixture(module: nn.Module) -> bool:
    """Returns True for a mixture of experts: a module with a router and experts."""
    return any(name == "experts" for name, _ in module.named_children())


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention. Tensors have the shapes of `LayerAttention`; the rows are the positions of the trace."""

    num_calls: int
    """Number of module calls before this one."""
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Scores
    output: Tensor
    """[1, rows, heads, head_dim]: the values that attention returned."""


@dataclass(eq=False)
class Trace:
    positions: Sequence[int]
    calls: list[Call] = field(default_factory=list)
    attention: dict[int, AttentionCall] = field(default_factory=dict)
    """The call of each layer."""

    def add(self, name: str, module: nn.Module, *, inputs: tuple[object, ...], output: object) -> None:
        if isinstance(module, nn.Dropout | nn.Identity):
            return  # they change nothing
        if isinstance(output, tuple) and is_mixture(module):
            output = output[0]  # the second is the scores of the router
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            self.calls.append(Call(len(self.calls), name, module, inputs[0].clone(), output.clone()))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        output = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)
        self.attention[layer] = AttentionCall(len(self.calls), query, key, value, scores, output)
        return output


@torch.inference_mode()
def trace(model: PreTrainedModel, positions: Sequence[int]) -> Trace:
    """Computes one token at each of `positions`, which do not see each other."""
    found = Trace(positions)

    def record(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_hook(
            lambda _, inputs, output: found.add(name, module, inputs=inputs, output=output)
        )

    handles = [record(name, module) for name, module in _units(model)]
    try:
        embeddings = cast("nn.Embedding", model.get_input_embeddings()).weight
        token = embeddings[:256].float().abs().sum(1).argmax()  # the embedding of padding can be zero
        ids = token.expand(1, len(positions))
        places = torch.tensor([list(positions)], device=model.device)
        with step_attention(found.attend):
            model(input_ids=ids, position_ids=places, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _units(model: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Returns the modules that are recorded as one, by their names: norms, mixtures of experts, and modules without
    parts."""
    found = []
    for name, module in model.named_children():
        where = f"{path}{name}"
        is_norm = "norm" in type(module).__name__.lower()
        if is_norm or is_mixture(module) or not any(True for _ in module.children()):
            found.append((where, module))
        else:
            found += _units(module, f"{where}.")
    return found
