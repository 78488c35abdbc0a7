"""A Hugging Face decoder as the structs the kernels read: weights packed into panels, a family's traits as numbers.

What is packed is taken out of the module, so that the weights are in memory once.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from motet.engines.native.attention.group import Scores
from motet.engines.native.cpu import library as c
from motet.engines.native.cpu.asked import scores_asked
from motet.engines.native.cpu.panels import Packer
from motet.engines.native.cpu.turns import Turns
from motet.engines.native.kv.storage import KVStorage

ACTIVATIONS = {"silu": c.SILU, "gelu_pytorch_tanh": c.GELU_TANH}
"""By Hugging Face's names."""


def obstacle(
    kernels: ctypes.CDLL | None, model: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the kernels, if there are any, cannot run a model; None if they can."""
    if kernels is None:
        return "the kernels were not built, or this processor has neither AVX-512 with bf16 nor AVX2 with FMA"
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"they compute in bfloat16 on the CPU, not in {str(dtype).removeprefix('torch.')} on {device.type}"
    if (name := activation_of(model.config)) not in ACTIVATIONS:
        return f"they do not know the activation {name!r}"
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, model.model.layers[0].self_attn.head_dim)
    if any(size % c.PANEL for size in sizes):
        return f"sizes {sizes} (hidden, intermediate, head) must be multiples of {c.PANEL}"
    return None


def activation_of(config: Any) -> str:
    """Gemma's configs have two fields, of which this one is right."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


class PackedModel:
    """Owns all memory that `struct` points to. The model must be free of obstacles."""

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
        self._kept: list[torch.Tensor] = []
        self._packer = Packer(kernels, _shapes_of(model), int8=int8)
        self._storage = storage
        self._centre = 1.0 if "Gemma" in type(model).__name__ else 0.0  # Gemma's norms multiply with 1 + weight
        self._turns = Turns(body.rotary_emb, max_positions)
        asked = scores_asked(model)
        layers = [
            self._layer(layer, i, scores) for i, (layer, scores) in enumerate(zip(body.layers, asked, strict=True))
        ]
        self._layers = (c.Layer * len(layers))(*layers)
        embedding = body.embed_tokens.weight.detach()
        tied = model.lm_head.weight.data_ptr() == embedding.data_ptr()
        self.vocab_size: int = config.vocab_size
        self.struct = c.Model(
            num_layers=len(self._layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=storage.keys.shape[2],
            head_dim=storage.keys.shape[3],
            intermediate=config.intermediate_size,
            vocab=self.vocab_size,
            block_size=storage.block_size,
            activation=ACTIVATIONS[activation_of(config)],
            epsilon=config.rms_norm_eps,
            logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
            embedding_scale=_embedding_scale(body.embed_tokens),
            layers=self._layers,
            embedding=None if tied else self._keep(embedding),
            head=self._linear(model.lm_head),
            final_norm=self._norm(body.norm),
        )
        _empty(body.embed_tokens)

    def _layer(self, layer: Any, index: int, scores: Scores) -> c.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms_twice = hasattr(layer, "pre_feedforward_layernorm")  # Gemma 2 and 3: what is added is normed too
        cosines, sines = self._turns.of(attention)
        return c.Layer(
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self._linear(attention.o_proj),
            gate_up=self._gated(mlp.gate_proj, mlp.up_proj),
            down=self._linear(mlp.down_proj),
            attention_norm=self._norm(layer.input_layernorm),
            mlp_norm=self._norm(layer.pre_feedforward_layernorm if norms_twice else layer.post_attention_layernorm),
            attention_post_norm=self._norm(layer.post_attention_layernorm) if norms_twice else None,
            mlp_post_norm=self._norm(layer.post_feedforward_layernorm) if norms_twice else None,
            query_norm=self._norm(getattr(attention, "q_norm", None)),
            key_norm=self._norm(getattr(attention, "k_norm", None)),
            cosines=self._keep(cosines),
            sines=self._keep(sines),
            keys=self._storage.keys[index].data_ptr(),
            values=self._storage.values[index].data_ptr(),
            window=scores.window or 0,
            score_scale=scores.scale,
            score_softcap=scores.softcap or 0.0,
        )

    def _linear(self, *parts: nn.Linear) -> c.Linear:
        """Several products of one input as one."""
        weight = torch.cat([part.weight.detach() for part in parts]).contiguous()
        bias = None
        if parts[0].bias is not None:
            bias = torch.cat([part.bias.detach() for part in parts])
        return self._packed(weight, None, bias, parts)

    def _gated(self, gate: nn.Linear, up: nn.Linear) -> c.Linear:
        """Both, 16 columns of one beside the same 16 of the other."""
        bias = None
        if gate.bias is not None:
            halves = [part.bias.detach().view(-1, 1, c.PANEL // 2) for part in (gate, up)]
            bias = torch.cat(halves, dim=1).flatten()
        return self._packed(gate.weight.detach().contiguous(), up.weight.detach().contiguous(), bias, (gate, up))

    def _packed(
        self, weight: torch.Tensor, beside: torch.Tensor | None, bias: torch.Tensor | None, parts: Sequence[nn.Module]
    ) -> c.Linear:
        panels = self._packer.pack(weight, beside)
        for part in parts:
            _empty(part)
        columns, depth = weight.shape
        return c.Linear(
            panels=self._keep(panels.numbers),
            scales=None if panels.scales is None else self._keep(panels.scales),
            bias=None if bias is None else self._keep(bias.float()),
            columns=columns if beside is None else 2 * columns,
            depth=depth,
        )

    def _norm(self, norm: Any) -> int | None:
        return None if norm is None else self._keep(norm.weight.detach().float() + self._centre)

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _shapes_of(model: PreTrainedModel) -> list[tuple[int, int]]:
    return [(module.out_features, module.in_features) for module in model.modules() if isinstance(module, nn.Linear)]


def _empty(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _embedding_scale(embedding: nn.Module) -> float:
    """Gemma's, rounded as its authors round it."""
    scale = getattr(embedding, "embed_scale", None)
    return float(scale.to(torch.bfloat16)) if isinstance(scale, torch.Tensor) else 1.0
