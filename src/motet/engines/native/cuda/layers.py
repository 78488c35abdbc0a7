"""The layers of a Hugging Face decoder in few launches, without complicated kernels: fused products, and one kernel for
the operations between two products.

    attention   one product for queries, keys and values; norm, RoPE and storing in one launch; the step's attention;
                the output product
    MLP         one product for gate and up; activation and gating in one launch; the down product
    norms       one launch each

The rest of the decoder is unchanged: its order of layers, embeddings, RoPE tables, residuals and head. Values between
two products are rounded once instead of after every operation, so they are closer to float32 than with separate
operators."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.engines.native import compiled_kernels as c
from motet.engines.native.cpu.model_reader import AttentionRead, LayerRead, Structure
from motet.engines.native.cpu.norm_reader import NormRead, StructureError
from motet.engines.native.cuda.launch import Activation, CudaStep, Norms, Operators
from motet.engines.native.model_weights import Slot, TensorWeights, names_of, tied_names

Paths = Mapping[nn.Module, str]

ACTIVATIONS = {c.SILU: Activation.SILU, c.GELU_TANH: Activation.GELU_TANH}
"""The GPU's activations by the codes of the compiled kernels."""


def fuse(model: PreTrainedModel, operators: Operators, *, structure: Structure) -> TensorWeights:
    """Replaces parts of the model's layers by the modules of this file, and returns the locations of the checkpoint's
    tensors in them. MLPs and norms that have no kernel are not replaced. Raises StructureError, without a change of the
    model, if there is no kernel for a layer's attention."""
    for read in structure.layers:
        check_attention(read.attention)
    slots = Slots(model)
    paths = {module: name for name, module in model.named_modules()}
    for index, read in enumerate(structure.layers):
        _replace_attention(model, paths, index=index, read=read.attention, operators=operators, slots=slots)
        _replace_mlp(model, paths, read=read, operators=operators, slots=slots)
    for norm in structure.norms:
        weight = norm.weight
        if not norm.centered and norm.bias is None and weight is not None and norm.width == weight.numel():
            replaced = Norm(norm_factors(norm), norm.epsilon, operators=operators)
            slots.norm(norm, replaced.weight)
            model.set_submodule(paths[norm.module], replaced)
    for module in model.modules():
        slots.same(module)
    return slots.weights()


def check_attention(read: AttentionRead) -> None:
    """Raises StructureError for attention that `Attention` cannot compute."""
    rotary, norms = read.rotary, [norm for norm in (read.query_norm, read.key_norm) if norm is not None]
    if len(read.qkv.parts) != 3:
        raise StructureError("a single product of queries, keys and values")
    if rotary is None or rotary.adjacent or rotary.dims != read.head_dim or read.rotates_first:
        raise StructureError("RoPE that is not of complete heads in two halves")
    if any(norm.centered or norm.bias is not None or norm.stride or norm.width != read.head_dim for norm in norms):
        raise StructureError("another norm of heads than the root mean square norm of each")
    if read.scores.sinks is not None:
        raise StructureError("attention sinks")


def _replace_attention(
    model: nn.Module, paths: Paths, *, index: int, read: AttentionRead, operators: Operators, slots: "Slots"
) -> None:
    norms = None
    if read.query_norm is not None and read.key_norm is not None:  # Qwen 3 and Gemma 3
        norms = Norms(norm_factors(read.query_norm), norm_factors(read.key_norm), read.query_norm.epsilon)
        slots.norm(read.query_norm, norms.query)
        slots.norm(read.key_norm, norms.key)
    attention = Attention(read, index, norms=norms, operators=operators)
    slots.fused(attention.qkv, *read.qkv.parts)
    slots.same(read.out)
    model.set_submodule(paths[read.out].rpartition(".")[0], attention)


def _replace_mlp(model: nn.Module, paths: Paths, *, read: LayerRead, operators: Operators, slots: "Slots") -> None:
    """Does nothing for an MLP that `GatedMLP` cannot compute."""
    mlp = read.mlp
    if mlp.experts is not None or mlp.up is None or mlp.down is None:
        return
    activation, parts = ACTIVATIONS.get(mlp.activation), mlp.up.parts
    if (
        activation is None
        or not mlp.gated
        or len(parts) != 2
        or any(one.bias is not None for one in (*parts, mlp.down))
    ):
        return
    gated = GatedMLP(parts, mlp.down, activation=activation, operators=operators)
    slots.fused(gated.gate_up, *parts)
    slots.same(mlp.down)
    model.set_submodule(paths[mlp.down].rpartition(".")[0], gated)


def norm_factors(norm: NormRead) -> Tensor:
    """Returns the factors of a norm, [width] float32: its weight, or 1 + weight in Gemma."""
    weight = norm.weight
    if weight is None:
        raise TypeError(f"{type(norm.module).__name__} has no weight")
    return weight.detach().float() + norm.offset


class Slots:
    """Records the location of each checkpoint tensor in the fused model, while the original modules still exist."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._names = names_of(model)
        self._tied = tied_names(self._names)
        self._slots: dict[str, Slot] = {}

    def same(self, module: nn.Module) -> None:
        """Records the tensors of a module that is not replaced. Ignores new modules: the checkpoint has none."""
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            self._record(tensor, tensor)

    def norm(self, old: NormRead, factors: Tensor) -> None:
        """Records `factors` as the location of a norm's weight."""
        self._record(old.weight, factors, offset=old.offset)

    def fused(self, product: nn.Linear, *parts: nn.Linear) -> None:
        """Records the rows of a fused product as the locations of the weights of `parts`."""
        begin = 0
        for part in parts:
            rows = slice(begin, begin + part.out_features)
            self._record(part.weight, product.weight[rows])
            if part.bias is not None:
                self._record(part.bias, product.bias[rows])
            begin += part.out_features

    def weights(self) -> TensorWeights:
        return TensorWeights(self._slots, tied=self._tied)

    def _record(self, parameter: Any, tensor: Tensor, *, offset: float = 0.0) -> None:
        for name in self._names.pop(id(parameter), ()):  # pop: a later parameter can get the id of a freed one
            self._slots[name] = Slot(tensor.detach(), offset, parameter.dtype)


class Attention(nn.Module):
    """Replaces a decoder layer's `self_attn`; the runner passes `step` through the model's forward."""

    def __init__(self, old: AttentionRead, layer: int, *, norms: Norms | None, operators: Operators) -> None:
        super().__init__()
        self.qkv = fused(*old.qkv.parts)
        self.out = old.out
        self._layer = layer
        self._scores = old.scores
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

    def __init__(
        self, gate_up: Sequence[nn.Linear], down: nn.Linear, *, activation: Activation, operators: Operators
    ) -> None:
        super().__init__()
        self.gate_up = fused(*gate_up)
        self.down = down
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
