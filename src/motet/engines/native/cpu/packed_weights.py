"""Turns a Hugging Face decoder into the structs that the kernels read: the parameters of its family, and its weights in
panels (`cpu.panels`). Weights that are packed are removed from the module, so they are in memory once.

New weights are written to a twin of the packed model, which replaces the model between two steps. Until then, the
current weights are unchanged, and both are in memory.
"""

import copy
import ctypes
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.engines.native import compiled_kernels as c
from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.cpu import panels
from motet.engines.native.cpu.memory import trim_heap
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.model_weights import names_of, tied_names

ACTIVATIONS = {"silu": c.SILU, "gelu_pytorch_tanh": c.GELU_TANH}
"""The kernels' code for each activation, by its name in Hugging Face's configs."""

LAYER_PARTS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "": (
        frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}),
        frozenset({"pre_feedforward_layernorm", "post_feedforward_layernorm"}),
    ),
    "self_attn": (frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}), frozenset({"q_norm", "k_norm"})),
    "mlp": (frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"}), frozenset()),
}
"""The modules that a layer must have and can have, by the path of their parent. Their factors, norms and order are
compared with transformers' when the model is loaded (`reference`)."""


def obstacle(
    kernels: ctypes.CDLL | None, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Returns the reason why the kernels (None if there are none) cannot run a model; None if they can."""
    if kernels is None:
        return "the kernels were not built, or this processor has neither AVX-512 with bf16 nor AVX2 with FMA"
    if device.type != "cpu" or dtype not in panels.DTYPE_CODES:
        name = str(dtype).removeprefix("torch.")
        return f"they compute in bfloat16 or float32 on the CPU, not in {name} on {device.type}"
    if (part := _unknown_part(model)) is not None:
        return f"they do not implement {part}"
    if (name := activation_of(model.config)) not in ACTIVATIONS:
        return f"they do not implement the activation {name!r}"
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, model.model.layers[0].self_attn.head_dim)
    if any(size % c.PANEL for size in sizes):
        return f"sizes {sizes} (hidden, intermediate, head) must be multiples of {c.PANEL}"
    return None


def _unknown_part(model: PreTrainedModel) -> str | None:
    """Returns a part of the model that the kernels lack, or have although the model lacks it; None if there is none."""
    for path, names in {"": {"model", "lm_head"}, "model": {"embed_tokens", "layers", "norm", "rotary_emb"}}.items():
        if {name for name, _ in model.get_submodule(path).named_children()} != names:
            return f"the parts of {type(model).__name__}"
    for number, layer in enumerate(model.get_submodule("model.layers").children()):
        for path, (required, optional) in LAYER_PARTS.items():
            found = {name for name, _ in layer.get_submodule(path).named_children()} if _has(layer, path) else set()
            if not required <= found <= required | optional:
                part = sorted((found - optional) ^ required)[0]
                return f"a layer {'with' if part in found else 'without'} {path or 'the part'} {part} (layer {number})"
    norms = {type(module).__name__: module for name, module in model.named_modules() if name.endswith("norm")}
    others = [name for name, norm in norms.items() if "RMSNorm" not in name or not hasattr(norm, "weight")]
    return f"the norm {others[0]}" if others else None


def _has(module: nn.Module, path: str) -> bool:
    return path in dict(module.named_modules())


def activation_of(config: Any) -> str:
    """Returns Hugging Face's name of the activation. Of the two fields of Gemma, `hidden_activation` is correct."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def norm_weight(norm: Any) -> Tensor:
    """Returns the factors of a norm, [width] float32: its weight, or 1 + weight in Gemma."""
    weight: Tensor = norm.weight.detach().float()
    return weight + norm_offset(norm)


def norm_offset(norm: Any) -> float:
    """Returns the number that is added to a norm's weight to get its factors."""
    return 1.0 if "Gemma" in type(norm).__name__ else 0.0


class PackedModel:
    """Owns all memory that `struct` points to. The model must be one for which `obstacle` returns None."""

    def __init__(
        self,
        model: PreTrainedModel,
        storage: KVStorage,
        *,
        max_positions: int,
        kernels: ctypes.CDLL,
        int8: bool = False,
    ) -> None:
        config, body = model.config, model.model
        self.locations: dict[str, panels.TensorLocation] = {}
        """Location of each tensor of the checkpoint, by its name."""
        self._names = names_of(model)
        self.tied = tied_names(self._names)
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        shapes = [(one.out_features, one.in_features) for one in linears]
        self._kernels = kernels
        self.dtype = storage.keys.dtype
        packer = panels.Packer(kernels, shapes, dtype=torch.int8 if int8 else self.dtype)
        self._pack = packer.pack
        self.memory = panels.PackedMemory(packer.arena)
        self._storage = storage
        self._model = model
        self._positions = torch.arange(max_positions).unsqueeze(0)
        self._cos_sin: dict[str | None, tuple[int, int]] = {}
        layers = [self._layer(body.layers[i], i, scores=scores) for i, scores in enumerate(layer_scores(model))]
        self.layers = (c.Layer * len(layers))(*layers)
        embedding = body.embed_tokens.weight.detach()
        tied = model.lm_head.weight.data_ptr() == embedding.data_ptr()
        self.vocab_size: int = config.vocab_size
        self.struct = c.Model(
            num_layers=len(self.layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=storage.keys.shape[2],
            head_dim=storage.keys.shape[3],
            vocab=self.vocab_size,
            block_size=storage.block_size,
            dtype=panels.DTYPE_CODES[storage.keys.dtype],
            logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
            logit_scale=1.0,
            embedding_scale=_embedding_scale(body.embed_tokens),
            layers=self.layers,
            embedding=None if tied else self._rows(body.embed_tokens.weight),
            head=self._linear(model.lm_head),
            final_norm=self._norm(body.norm),
        )
        _empty(body.embed_tokens)
        del self._pack  # it refers to the arena, which a twin must not keep alive

    def twin(self, *, empty: bool = False) -> "PackedModel":
        """Returns a copy of the model with its own memory for weights, which is a copy of the current weights, or zeros
        if `empty`. Both models use the same KV cache."""
        twin = copy.copy(self)
        twin.memory, addresses = self.memory.copied(empty=empty)
        twin.layers = type(self.layers).from_buffer_copy(self.layers)
        twin.struct = c.Model.from_buffer_copy(self.struct)
        for struct in (*twin.layers, twin.struct):
            relocate(struct, addresses)
        twin.struct.layers = twin.layers
        return twin

    def write(self, name: str, tensor: Tensor) -> None:
        """Replaces one tensor of the checkpoint. The model must not run during this time."""
        self.locations[name].write(self.memory, tensor.detach().to("cpu", self.dtype))

    def numbers(self, name: str) -> list[Tensor]:
        """Returns the tensors that the model has in place of a tensor of the checkpoint."""
        return self.locations[name].read(self.memory)

    def _layer(self, layer: Any, index: int, *, scores: Scores) -> c.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        # Gemma 2 and 3 also apply a norm to the output that is added.
        norms_twice = hasattr(layer, "pre_feedforward_layernorm")
        return c.Layer(
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self._linear(attention.o_proj),
            gate_up=self._linear(mlp.gate_proj, mlp.up_proj, interleaved=True),
            down=self._linear(mlp.down_proj),
            attention_norm=self._norm(layer.input_layernorm),
            mlp_norm=self._norm(layer.pre_feedforward_layernorm if norms_twice else layer.post_attention_layernorm),
            attention_post_norm=self._norm(layer.post_attention_layernorm if norms_twice else None),
            mlp_post_norm=self._norm(layer.post_feedforward_layernorm if norms_twice else None),
            query_norm=self._norm(getattr(attention, "q_norm", None)),
            key_norm=self._norm(getattr(attention, "k_norm", None)),
            rotary=self._rotary_of(attention),
            keys=self._storage.keys[index].data_ptr(),
            values=self._storage.values[index].data_ptr(),
            window=scores.window or 0,
            score_scale=scores.scale,
            score_softcap=scores.softcap or 0.0,
            residual_scale=1.0,
            activation=ACTIVATIONS[activation_of(self._model.config)],
            gated=1,
        )

    def _linear(self, *parts: nn.Linear, interleaved: bool = False) -> c.PackedLinear:
        """Packs several products with the same input as one fused product. Columns of the weights are concatenated;
        with `interleaved`, 16 columns of one weight alternate with the same 16 columns of the other."""
        weights = [part.weight.detach() for part in parts]
        packed = self._pack(*(weights if interleaved else [torch.cat(weights)]))
        biases = [part.bias.detach().float() for part in parts if part.bias is not None]
        shape = (-1, c.PANEL // 2) if interleaved else (1, -1)
        bias = torch.cat([one.view(shape) for one in biases], dim=1) if biases else None
        linear = c.PackedLinear(
            panels=self._keep(packed.numbers),
            scales=None if packed.scales is None else self._keep(packed.scales),
            bias=None if bias is None else self._keep(bias),
            columns=sum(len(weight) for weight in weights),
            depth=weights[0].shape[1],
        )
        begin = 0
        for side, part in enumerate(parts):
            columns = panels.Columns(0, side) if interleaved else panels.Columns(begin)
            product, kept = len(self.memory.products), len(self.memory.kept) - 1
            self._locate(
                part.weight,
                write=partial(panels.write_columns, kernels=self._kernels, product=product, columns=columns),
                read=partial(panels.read_columns, product=product, columns=columns, count=part.out_features),
            )
            if bias is not None:
                self._locate(
                    part.bias,
                    write=partial(panels.write_bias, kept=kept, columns=columns),
                    read=partial(panels.read_bias, kept=kept, columns=columns, count=part.out_features),
                )
            begin += part.out_features
            _empty(part)
        self.memory.products.append(packed)
        trim_heap()  # otherwise the heap keeps the memory of the freed parameters
        return linear

    def _rows(self, weight: Tensor) -> int:
        """Returns the address of embeddings [vocab_size, hidden]."""
        kept = len(self.memory.kept)
        self._locate(
            weight, write=partial(panels.write_numbers, kept=kept), read=partial(panels.read_numbers, kept=kept)
        )
        self.memory.rows.append(kept)
        return self._keep(weight.detach())

    def _locate(self, parameter: Tensor, *, write: panels.Write, read: panels.Read) -> None:
        for name in self._names[id(parameter)]:
            self.locations[name] = panels.TensorLocation(tuple(parameter.shape), write, read)

    @torch.no_grad()
    def _rotary_of(self, attention: Any) -> c.Rotary:
        """Returns the RoPE tables of a layer: cosines and sines, each [positions, head_dim / 2] float32, computed by
        the model's own module. Gemma 3 has two kinds of layers with different tables."""
        kind = attention.layer_type if hasattr(self._model.model.rotary_emb, "layer_types") else None
        if kind not in self._cos_sin:
            which = () if kind is None else (kind,)
            rotary = self._model.model.rotary_emb
            cosines, sines = rotary(torch.empty(0), self._positions, *which)  # [1, positions, head_dim]
            half = cosines.shape[-1] // 2  # both halves are equal
            self._cos_sin[kind] = self._keep(cosines[0, :, :half]), self._keep(sines[0, :, :half])
        cosines, sines = self._cos_sin[kind]
        return c.Rotary(cosines, sines, dims=self._storage.keys.shape[3])

    def _norm(self, norm: Any) -> c.PackedNorm:
        if norm is None:
            return c.PackedNorm()
        kept = len(self.memory.kept)
        write = partial(panels.write_numbers, kept=kept, offset=norm_offset(norm))
        self._locate(norm.weight, write=write, read=partial(panels.read_numbers, kept=kept))
        epsilon = self._model.config.rms_norm_eps
        return c.PackedNorm(self._keep(norm_weight(norm)), width=norm.weight.numel(), epsilon=epsilon)

    def _keep(self, tensor: Tensor) -> int:
        """Keeps a tensor as long as the model's memory, and returns its address."""
        tensor = tensor.contiguous()
        self.memory.kept.append(tensor)
        return tensor.data_ptr()


def relocate(struct: ctypes.Structure, addresses: Mapping[int, int]) -> None:
    """Replaces a struct's addresses according to `addresses`; all others, such as in the KV cache, are unchanged."""
    for name, kind, *_ in struct._fields_:
        value = getattr(struct, name)
        if isinstance(value, ctypes.Structure):
            relocate(value, addresses)
        elif kind is ctypes.c_void_p and value in addresses:
            setattr(struct, name, addresses[value])


def _empty(module: nn.Module) -> None:
    """Removes a module's weight, so that its memory can be freed."""
    module.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _embedding_scale(embedding: Any) -> float:
    """Returns the factor of Gemma's embeddings, rounded to the weights' dtype as in the original; 1 for all others."""
    scale = getattr(embedding, "embed_scale", None)
    return float(scale.to(embedding.weight.dtype)) if isinstance(scale, Tensor) else 1.0


@torch.inference_mode()
def layer_scores(model: PreTrainedModel) -> list[Scores]:
    """Returns the parameters of attention of each layer: scale, window and cap of its scores.

    Families store them in different places (a module's attribute, the config, a table by layer), but all pass them to
    the attention function. The model is therefore run on one token, with an attention function that records them."""
    scores_by_layer: dict[int, Scores] = {}

    def record(layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        scores_by_layer[layer] = scores
        return query.transpose(1, 2)

    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1, step=record)
    return [scores_by_layer[layer] for layer in range(len(scores_by_layer))]
