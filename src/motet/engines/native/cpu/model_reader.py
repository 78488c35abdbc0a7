"""Reads the structure of a decoder for the compiled kernels: the products, norms and activations of each layer in their
order, and the parameters of its attention. Families are not known by name; see `model_trace`.

What cannot be recognized raises StructureError, and torch's operators run the model. What is recognized wrongly changes
the logits, which `checks.reference` compares with transformers' before the model serves.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.engines.native import compiled_kernels as c
from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.cpu.expert_reader import ExpertsRead, read_experts
from motet.engines.native.cpu.model_trace import AttentionCall, Call, is_mixture, trace
from motet.engines.native.cpu.norm_reader import (
    CLOSE,
    NormRead,
    StructureError,
    activation_code,
    close,
    equal,
    read_norm,
)
from motet.engines.native.cpu.rotary_reader import RotaryRead, RotaryReader
from motet.errors import MotetError
from motet.log import cut

logger = logging.getLogger(__name__)

LANES = c.PANEL // 2
"""Number of adjacent numbers that the kernels compute at once."""
MAX_REASON_CHARS = 200
"""Maximum length of an unexpected error in the reason."""


@dataclass(frozen=True, eq=False)
class Product:
    """The products of a checkpoint that multiply the same input. The kernels compute them as one."""

    parts: Sequence[nn.Linear]
    blocks: Sequence[int] | None = None
    """Order in which the kernels have the columns of a single part, in blocks of equal size; None if it is the same."""

    @property
    def columns(self) -> int:
        return sum(part.out_features for part in self.parts)

    def pieces(self, count: int) -> list[tuple[nn.Linear, slice | Tensor]]:
        """Returns the rows of each weight that become adjacent columns of the kernels' product. A single part is cut
        into `count` pieces, such as gate and up."""
        if self.blocks is not None:
            [part] = self.parts
            return [(part, torch.arange(part.out_features).view(len(self.blocks), -1)[list(self.blocks)].flatten())]
        if len(self.parts) == count:
            return [(part, slice(0, part.out_features)) for part in self.parts]
        [part] = self.parts
        size = part.out_features // count
        return [(part, slice(at, at + size)) for at in range(0, part.out_features, size)]


@dataclass(frozen=True, eq=False)
class MLPRead:
    up: Product | None
    """Gate and up, or up alone. A single part with a gate is [gate, up]. In a mixture of experts, the shared expert;
    None without one."""
    down: nn.Linear | None
    norm: NormRead | None
    post_norm: NormRead | None
    activation: int
    gated: bool
    parallel: bool
    """True if the feed-forward part reads the input of the layer, and not its sum with the output of attention."""
    experts: ExpertsRead | None = None


@dataclass(frozen=True, eq=False)
class AttentionRead:
    qkv: Product
    out: nn.Linear
    norm: NormRead | None
    post_norm: NormRead | None
    query_norm: NormRead | None
    key_norm: NormRead | None
    rotary: RotaryRead | None
    rotates_first: bool
    """True if the norms of queries and keys are applied after RoPE."""
    scores: Scores
    head_dim: int


@dataclass(frozen=True, eq=False)
class LayerRead:
    attention: AttentionRead
    mlp: MLPRead
    residual_scale: float


@dataclass(frozen=True, eq=False)
class Structure:
    """The parts and parameters of a model that the kernels use."""

    layers: Sequence[LayerRead]
    embedding: nn.Embedding
    embedding_scale: float
    final_norm: NormRead
    head: nn.Linear
    logit_scale: float
    logit_softcap: float

    @property
    def norms(self) -> list[NormRead]:
        """The norms of hidden states, each once."""
        found: list[NormRead | None] = [self.final_norm]
        for layer in self.layers:
            found += [layer.attention.norm, layer.attention.post_norm, layer.mlp.norm, layer.mlp.post_norm]
        return list({norm.module: norm for norm in found if norm is not None}.values())

    def unsupported_reason(self) -> str | None:
        """Returns the reason why the kernels cannot compute with the sizes of this model; None if they can."""
        for layer in self.layers:
            attention = layer.attention
            if attention.head_dim % 2:
                return f"the size {attention.head_dim} of heads is odd"
            for norm in (attention.query_norm, attention.key_norm):
                if norm is not None and norm.width % LANES:
                    return f"heads have norms, and their size {norm.width} is not a multiple of {LANES}"
        if wrong := [size for size in self._sizes() if size % c.PANEL]:
            return (
                f"the size {wrong[0]} of hidden states, of all key heads or of products is not a multiple of {c.PANEL}"
            )
        return None

    def _sizes(self) -> list[int]:
        """Returns the sizes of hidden states, of all key heads of a layer, and of the inputs and outputs of products,
        except for the vocabulary."""
        found = {self.embedding.embedding_dim}
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            queries = attention.out.in_features
            found |= {queries, (attention.qkv.columns - queries) // 2}
            found |= set() if mlp.down is None else {mlp.down.in_features}
            found |= set() if mlp.experts is None else {mlp.experts.width}
        return sorted(found)


def read_structure(model: PreTrainedModel, *, max_positions: int) -> Structure:
    """Raises StructureError with the reason if the kernels do not implement the model."""
    try:
        return _read_structure(model, max_positions=max_positions)
    except (StructureError, MotetError):
        raise
    except Exception as error:  # a form that no model had until now; torch's operators can still run the model
        logger.warning("the structure of a model cannot be read", exc_info=error)
        name = type(model).__name__
        raise StructureError(f"the structure of {name} ({cut(str(error), MAX_REASON_CHARS)})") from error


@torch.inference_mode()
def _read_structure(model: PreTrainedModel, *, max_positions: int) -> Structure:
    config = model.config
    if getattr(config, "clip_qkv", None) is not None:  # the numbers of random tokens can be below the limit
        raise StructureError("clip_qkv")
    path, layers = _layers(model)
    found = trace(
        model, sorted({0, *(at for at in (1, 2, max_positions // 2) if at < max_positions), max_positions - 1})
    )
    modules = dict(model.named_modules())
    outside = [call for call in found.calls if not call.name.startswith(f"{path}.")]
    rotary = RotaryReader(
        [one for name, one in modules.items() if "Rotary" in type(one).__name__ and not name.startswith(f"{path}.")],
        found.positions,
    )
    embedding, final_norm, head = _outside(outside)
    reads = []
    for number, layer in enumerate(layers):
        calls = [call for call in found.calls if call.name.startswith(f"{path}.{number}.")]
        if number == 0:
            embedding_scale = _embedding_scale(model, embedding, first=calls[0])
        try:
            reads.append(_read_layer(layer, calls, attention=found.attention.get(number), rotary=rotary))
        except StructureError as error:
            raise StructureError(f"{error} (layer {number})") from error
    return Structure(
        layers=reads,
        embedding=embedding.module,
        embedding_scale=embedding_scale,
        final_norm=read_norm(final_norm),
        head=head.module,
        logit_scale=getattr(model, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1),
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )


def _layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Returns the list of decoder layers and its name."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        raise StructureError("a model without a list of layers")
    name = max(lists, key=lambda name: sum(one.numel() for one in lists[name].parameters()))
    return name, lists[name]


def _outside(calls: Sequence[Call]) -> tuple[Call, Call, Call]:
    """Returns the embedding, the last norm and the head: all that a model can have outside of its layers."""
    embeddings = [call for call in calls if call.is_embedding]
    norms = [call for call in calls if call.is_norm]
    heads = [call for call in calls if call.is_product]
    others = [call for call in calls if call.is_other] + embeddings[1:] + norms[:-1] + heads[:-1]
    if others:
        raise StructureError(f"the part {others[0].name}")
    if not (embeddings and norms and heads and equal(norms[0].output, heads[0].input)):
        raise StructureError("a model without an embedding, a last norm or a head")
    return embeddings[0], norms[0], heads[0]


def _embedding_scale(model: PreTrainedModel, embedding: Call, *, first: Call) -> float:
    """Returns the factor of embeddings. Gemma's module applies it itself, rounded to the dtype of the weights."""
    scale = getattr(embedding.module, "embed_scale", None)
    own = float(scale.to(embedding.output.dtype)) if isinstance(scale, Tensor) else 1.0
    factor = float(getattr(model.base_model, "embedding_multiplier", None) or 1.0)
    if not close(first.input, embedding.output * factor):
        raise StructureError("operations between the embedding and the first layer")
    return own * factor


def _read_layer(
    layer: nn.Module, calls: Sequence[Call], *, attention: AttentionCall | None, rotary: RotaryReader
) -> LayerRead:
    if attention is None:
        raise StructureError("a layer without attention")
    before = [call for call in calls if call.number < attention.num_calls]
    qkv = [call for call in before if call.is_product]
    if len(qkv) > 3:  # such as latent attention
        raise StructureError(f"{len(qkv)} products before attention")
    out = next((call for call in calls if call.is_product and equal(call.input, attention.output)), None)
    if out is None or not qkv:
        raise StructureError("attention without a product before it, or after it")
    head_norms = [call for call in before if call.is_norm and call.number > qkv[0].number]
    rest = [call for call in calls if call is not out and call not in qkv and call not in head_norms]
    norms = _Norms([call for call in rest if call.is_norm])
    norm = norms.before(qkv[0])
    start = qkv[0].input if norm is None else norm.input
    read = _read_attention(qkv, head_norms, attention=attention, rotary=rotary)
    read.update(out=out.module, norm=_read(norm), post_norm=_read(norms.after(out)))
    mlp = _read_mlp([call for call in rest if not call.is_norm], norms=norms, start=start)
    norms.check()
    scale = getattr(layer, "residual_multiplier", None)
    return LayerRead(AttentionRead(**read), mlp, 1.0 if scale is None else float(scale))


def _read(norm: Call | None) -> NormRead | None:
    return None if norm is None else read_norm(norm)


class _Norms:
    """Finds the norms of a layer by the products before or after them."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._unused = list(calls)
        self._calls = calls

    def before(self, product: Call) -> Call | None:
        found = [call for call in self._calls if call.number < product.number and equal(call.output, product.input)]
        return self._used(found[-1] if found else None)

    def after(self, product: Call) -> Call | None:
        found = [call for call in self._calls if call.number > product.number and equal(call.input, product.output)]
        return self._used(found[0] if found else None)

    def check(self) -> None:
        """Raises StructureError if a norm is elsewhere."""
        if self._unused:
            raise StructureError(f"a norm at the place of {self._unused[0].name.split('.')[-1]}")

    def _used(self, found: Call | None) -> Call | None:
        self._unused = [call for call in self._unused if call is not found]
        return found


def _read_mlp(calls: Sequence[Call], *, norms: _Norms, start: Tensor) -> MLPRead:
    """`start`: hidden states that enter the layer."""
    if len(calls) == 1 and is_mixture(calls[0].module):
        return _read_mixture(calls[0], norms=norms, start=start)
    products, others = [call for call in calls if call.is_product], [call for call in calls if call.is_other]
    if len(others) != 1 or len(products) not in (2, 3) or len(products) + 1 != len(calls):
        names = sorted({".".join(call.name.split(".")[-2:]) for call in calls})
        raise StructureError(f"a feed-forward part with {', '.join(names[:5])}")
    [activation], [*ups, down] = others, products
    gate, up, gated = activation.output, ups[-1].output, True
    if len(ups) == 1:
        halves = ups[0].output.chunk(2, dim=-1)
        gated = not equal(activation.input, ups[0].output)
        if gated and not equal(activation.input, halves[0]):
            raise StructureError("a feed-forward part whose gate is not the first half")
        up = halves[1]
    elif equal(activation.input, ups[1].output):
        ups, up = ups[::-1], ups[0].output
    if not close(down.input, gate * up if gated else gate):
        raise StructureError("another gate of the feed-forward part")
    norm = norms.before(ups[0])
    return MLPRead(
        up=Product([call.module for call in ups]),
        down=down.module,
        norm=_read(norm),
        post_norm=_read(norms.after(down)),
        activation=activation_code(activation.module),
        gated=gated,
        parallel=equal(ups[0].input if norm is None else norm.input, start),
    )


def _read_mixture(call: Call, *, norms: _Norms, start: Tensor) -> MLPRead:
    experts = read_experts(call.module)
    parts: dict[str, Any] = {} if experts.shared is None else dict(experts.shared.named_children())
    if parts and parts.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        raise StructureError(f"the shared expert {type(experts.shared).__name__}")
    norm = norms.before(call)
    if equal(call.input if norm is None else norm.input, start):
        raise StructureError("experts that read the input of the layer")
    activation = getattr(experts.experts, "act_fn", None)
    return MLPRead(
        up=Product([parts["gate_proj"], parts["up_proj"]]) if parts else None,
        down=parts["down_proj"] if parts else None,
        norm=_read(norm),
        post_norm=_read(norms.after(call)),
        activation=0 if activation is None else activation_code(activation),
        gated=True,
        parallel=False,
        experts=experts,
    )


def _read_attention(
    qkv: Sequence[Call], norms: Sequence[Call], *, attention: AttentionCall, rotary: RotaryReader
) -> dict[str, Any]:
    """Returns fields of `AttentionRead`. `norms`: the norms of queries and keys."""
    query, key = attention.query[0], attention.key[0]
    if norms and [call.output.numel() for call in norms] != [query.numel(), key.numel()]:
        raise StructureError(f"the norm {norms[-1].name.split('.')[-1]}")
    inner = [_by_head(call.input, like) for call, like in zip(norms, (query, key), strict=False)]
    rotates_first = bool(norms) and equal(_by_head(norms[0].output, query), query)
    rotated = inner[0] if rotates_first else query
    return {
        "qkv": _qkv(qkv, attention, heads=inner or [query, key]),
        "query_norm": _read(norms[0]) if norms else None,
        "key_norm": _read(norms[1]) if norms else None,
        "rotary": rotary.read(rotated),
        "rotates_first": rotates_first,
        "scores": attention.scores,
        "head_dim": query.shape[2],
    }


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    """Returns queries or keys as [heads, rows, head_dim], the shape of `like`."""
    heads, rows, width = like.shape
    if x.dim() == like.dim() + 1 and x.shape[1] == heads and x.shape[2] == rows:
        return x[0]
    return x.reshape(rows, heads, width).transpose(0, 1)


def _qkv(calls: Sequence[Call], attention: AttentionCall, *, heads: Sequence[Tensor]) -> Product:
    """`heads`: queries and keys as they were projected, at position 0, each [heads, rows, head_dim]."""
    value = attention.value[0]
    parts = [call.module for call in calls]
    widths = [one.shape[0] * one.shape[2] for one in (*heads, value)]
    if len(calls) == 3:
        if [part.out_features for part in parts] != widths or not equal(calls[2].output, value.transpose(0, 1)):
            raise StructureError("products of queries, keys and values in another order")
        return Product(parts)
    if len(calls) != 1 or parts[0].out_features != sum(widths):
        raise StructureError(f"{len(calls)} products before attention")
    blocks = F.normalize(calls[0].output[0, 0].float().view(-1, value.shape[2]), dim=-1)
    wanted = F.normalize(torch.cat([one[:, 0].float() for one in (*heads, value)]), dim=-1)
    likeness, order = (wanted @ blocks.T).max(dim=1)
    if float(likeness.min()) < 1 - CLOSE or sorted(order.tolist()) != [*range(len(blocks))]:
        raise StructureError("a product of queries, keys and values whose columns are not grouped by head")
    return Product(parts, None if order.tolist() == [*range(len(blocks))] else order.tolist())
