"""The layers of a Hugging Face decoder in few launches, without complicated kernels: merged products, and one kernel
for the operations between two products.

    attention   one product for queries, keys and values; norm, turn and store in one launch; the step's attention; the
                output's product
    MLP         one product for gate and up; the activation and what it gates in one launch; the product back
    norms       one launch each

The decoder stays Hugging Face's: its order of layers, embeddings, angles, residuals, head. Values between two products
are rounded once, not after every operation of a chain, so that they are nearer to float32 than the chain's.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from motet.engines.native.attention.group import Scores
from motet.engines.native.cpu.weights import activation_of, layer_scores, norm_weight
from motet.engines.native.cuda.launch import Activation, CudaStep, Norms, Operators


def fuse(model: PreTrainedModel, operators: Operators) -> None:
    """Replaces the model's layers by ours. An MLP with an activation that we do not know stays as it is."""
    epsilon = model.config.rms_norm_eps
    activation = activation_of(model.config)
    for index, (layer, scores) in enumerate(zip(model.model.layers, layer_scores(model), strict=True)):
        old, norms = layer.self_attn, None
        if getattr(old, "q_norm", None) is not None:  # Qwen 3 and Gemma 3
            norms = Norms(norm_weight(old.q_norm), norm_weight(old.k_norm), epsilon)
        layer.self_attn = Attention(old, index, scores=scores, norms=norms, operators=operators)
        if activation in {known.value for known in Activation}:
            layer.mlp = GatedMLP(layer.mlp, Activation(activation), operators=operators)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, Norm(norm_weight(module), epsilon, operators=operators))


class Attention(nn.Module):
    """Replaces a decoder layer's `self_attn`; the runner passes `step` through the model's forward."""

    def __init__(self, old: Any, layer: int, *, scores: Scores, norms: Norms | None, operators: Operators) -> None:
        super().__init__()
        self.qkv = merged(old.q_proj, old.k_proj, old.v_proj)
        self.out: nn.Linear = old.o_proj
        self._layer = layer
        self._scores = scores
        self._norms = norms
        self._operators = operators

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, rows, hidden]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # both [1, rows, head_dim]
        *,
        step: CudaStep,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        cosines, sines = position_embeddings
        qkv = self.qkv(hidden_states[0])
        query = self._operators.turn(self._layer, qkv, turns=(cosines[0], sines[0]), norms=self._norms, step=step)
        output = self._operators.attend(self._layer, query, step=step, scores=self._scores)
        return self.out(output.flatten(1)).unsqueeze(0), None


class GatedMLP(nn.Module):
    """Computes down(activation(gate(x)) * up(x))."""

    def __init__(self, old: Any, activation: Activation, *, operators: Operators) -> None:
        super().__init__()
        self.gate_up = merged(old.gate_proj, old.up_proj)
        self.down: nn.Linear = old.down_proj
        self._activation = activation
        self._operators = operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [1, rows, hidden] to a tensor of the same shape."""
        gated = self._operators.gate(self.gate_up(x[0]), self._activation)
        down: torch.Tensor = self.down(gated)
        return down.unsqueeze(0)


class Norm(nn.Module):
    def __init__(self, weight: torch.Tensor, epsilon: float, *, operators: Operators) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon = epsilon
        self._operators = operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._operators.norm(x.contiguous(), self.weight, epsilon=self._epsilon)


def merged(*parts: nn.Linear) -> nn.Linear:
    """Returns the products of one input as one; the weights are in memory once, there."""
    one = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), bias=False, device="meta")
    one.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        one.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    return one
