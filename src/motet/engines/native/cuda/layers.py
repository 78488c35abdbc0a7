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

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.cpu.packed_weights import activation_of, layer_scores, norm_offset, norm_weight
from motet.engines.native.cuda.launch import Activation, CudaStep, Norms, Operators
from motet.engines.native.model_weights import Slot, TensorWeights, names_of, tied_names


def fuse(model: PreTrainedModel, operators: Operators) -> TensorWeights:
    """Replaces the model's layers by ours, and returns where the tensors of a checkpoint are in them. An MLP with an
    activation that we do not know stays as it is."""
    epsilon = model.config.rms_norm_eps
    slots = Slots(model)
    activation = activation_of(model.config)
    for index, (layer, scores) in enumerate(zip(model.model.layers, layer_scores(model), strict=True)):
        old, norms = layer.self_attn, None
        if getattr(old, "q_norm", None) is not None:  # Qwen 3 and Gemma 3
            norms = Norms(norm_weight(old.q_norm), norm_weight(old.k_norm), epsilon)
            slots.norm(old.q_norm, norms.query)
            slots.norm(old.k_norm, norms.key)
        layer.self_attn = Attention(old, index, scores=scores, norms=norms, operators=operators)
        slots.merged(layer.self_attn.qkv, old.q_proj, old.k_proj, old.v_proj)
        slots.same(old.o_proj)
        if activation in {known.value for known in Activation}:
            gated = layer.mlp
            layer.mlp = GatedMLP(gated, Activation(activation), operators=operators)
            slots.merged(layer.mlp.gate_up, gated.gate_proj, gated.up_proj)
            slots.same(gated.down_proj)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = Norm(norm_weight(module), epsilon, operators=operators)
            slots.norm(module, norm.weight)
            model.set_submodule(name, norm)
        elif isinstance(module, nn.Linear | nn.Embedding):
            slots.same(module)
    return slots.weights(model.dtype)


class Slots:
    """Notes where each tensor of a checkpoint is in the fused model, while its old modules are still there."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._names = names_of(model)
        self._tied = tied_names(self._names)
        self._slots: dict[str, Slot] = {}

    def same(self, module: nn.Module) -> None:
        """Called for a module that stays. One that is new has no name in the checkpoint, and is passed over."""
        for parameter in module.parameters():
            self._note(parameter, parameter)

    def norm(self, old: nn.Module, factors: torch.Tensor) -> None:
        self._note(old.weight, factors, more=norm_offset(old))

    def merged(self, one: nn.Linear, *parts: nn.Linear) -> None:
        begin = 0
        for part in parts:
            rows = slice(begin, begin + part.out_features)
            self._note(part.weight, one.weight[rows])
            if part.bias is not None:
                self._note(part.bias, one.bias[rows])
            begin += part.out_features

    def weights(self, dtype: torch.dtype) -> TensorWeights:
        return TensorWeights(self._slots, tied=self._tied, dtype=dtype)

    def _note(self, parameter: Any, numbers: torch.Tensor, *, more: float = 0.0) -> None:
        for name in self._names.pop(id(parameter), ()):  # once: a later parameter may get the id of one that is gone
            self._slots[name] = Slot(numbers.detach(), more)


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
