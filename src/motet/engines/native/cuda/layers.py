"""The layers of a Hugging Face decoder in few launches, without complicated kernels: fused products, and one kernel for
the operations between two products.

    attention   one product for queries, keys and values; norm, RoPE and storing in one launch; the step's attention;
                the output product
    MLP         one product for gate and up; activation and gating in one launch; the down product
    norms       one launch each

The rest of the decoder is unchanged: its order of layers, embeddings, RoPE tables, residuals and head. Values between
two products are rounded once instead of after every operation, so they are closer to float32 than with separate
operators."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.cpu.packed_weights import activation_of, layer_scores, norm_offset, norm_weight
from motet.engines.native.cuda.launch import Activation, CudaStep, Norms, Operators
from motet.engines.native.model_weights import Slot, TensorWeights, names_of, tied_names


def fuse(model: PreTrainedModel, operators: Operators) -> TensorWeights:
    """Replaces the model's layers by the layers of this file, and returns the locations of the checkpoint's tensors in
    them. An MLP whose activation has no kernel is not replaced."""
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
        slots.fused(layer.self_attn.qkv, old.q_proj, old.k_proj, old.v_proj)
        slots.same(old.o_proj)
        if activation in {known.value for known in Activation}:
            gated = layer.mlp
            layer.mlp = GatedMLP(gated, Activation(activation), operators=operators)
            slots.fused(layer.mlp.gate_up, gated.gate_proj, gated.up_proj)
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
    """Records the location of each checkpoint tensor in the fused model, while the original modules still exist."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._names = names_of(model)
        self._tied = tied_names(self._names)
        self._slots: dict[str, Slot] = {}

    def same(self, module: nn.Module) -> None:
        """Records the parameters of a module that is not replaced. Ignores new modules: the checkpoint has none."""
        for parameter in module.parameters():
            self._record(parameter, parameter)

    def norm(self, old: nn.Module, factors: Tensor) -> None:
        """Records `factors` as the location of a norm's weight."""
        self._record(old.weight, factors, offset=norm_offset(old))

    def fused(self, product: nn.Linear, *parts: nn.Linear) -> None:
        """Records the rows of a fused product as the locations of the weights of `parts`."""
        begin = 0
        for part in parts:
            rows = slice(begin, begin + part.out_features)
            self._record(part.weight, product.weight[rows])
            if part.bias is not None:
                self._record(part.bias, product.bias[rows])
            begin += part.out_features

    def weights(self, dtype: torch.dtype) -> TensorWeights:
        return TensorWeights(self._slots, tied=self._tied, dtype=dtype)

    def _record(self, parameter: Any, tensor: Tensor, *, offset: float = 0.0) -> None:
        for name in self._names.pop(id(parameter), ()):  # pop: a later parameter can get the id of a freed one
            self._slots[name] = Slot(tensor.detach(), offset)


class Attention(nn.Module):
    """Replaces a decoder layer's `self_attn`; the runner passes `step` through the model's forward."""

    def __init__(self, old: Any, layer: int, *, scores: Scores, norms: Norms | None, operators: Operators) -> None:
        super().__init__()
        self.qkv = fused(old.q_proj, old.k_proj, old.v_proj)
        self.out: nn.Linear = old.o_proj
        self._layer = layer
        self._scores = scores
        self._norms = norms
        self._operators = operators

    def forward(
        self,
        hidden_states: Tensor,  # [1, rows, hidden]
        position_embeddings: tuple[Tensor, Tensor],  # both [1, rows, head_dim]
        *,
        step: CudaStep,
        **_: object,
    ) -> tuple[Tensor, None]:
        cosines, sines = position_embeddings
        qkv = self.qkv(hidden_states[0])
        query = self._operators.rotate(self._layer, qkv, cos_sin=(cosines[0], sines[0]), norms=self._norms, step=step)
        output = self._operators.attend(self._layer, query, step=step, scores=self._scores)
        return self.out(output.flatten(1)).unsqueeze(0), None


class GatedMLP(nn.Module):
    """Computes down(activation(gate(x)) * up(x))."""

    def __init__(self, old: Any, activation: Activation, *, operators: Operators) -> None:
        super().__init__()
        self.gate_up = fused(old.gate_proj, old.up_proj)
        self.down: nn.Linear = old.down_proj
        self._activation = activation
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [1, rows, hidden] to a tensor of the same shape."""
        gated = self._operators.gate(self.gate_up(x[0]), self._activation)
        down: Tensor = self.down(gated)
        return down.unsqueeze(0)


class Norm(nn.Module):
    """Replaces a root mean square norm."""

    def __init__(self, weight: Tensor, epsilon: float, *, operators: Operators) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon = epsilon
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        return self._operators.norm(x.contiguous(), self.weight, epsilon=self._epsilon)


def fused(*parts: nn.Linear) -> nn.Linear:
    """Returns one product with the concatenated weights of several products of the same input. The weights are copied,
    so the originals can be freed."""
    product = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), bias=False, device="meta")
    product.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        product.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    return product
