"""Turns a Hugging Face decoder into the structs that the kernels read: its structure (`model_reader`), and its weights
in panels (`cpu.panels`). Weights that are packed are removed from the module, so they are in memory once.

New weights are written to a twin of the packed model, which replaces the model between two steps. Until then, the
current weights are unchanged, and both are in memory.
"""

import copy
import ctypes
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.engines.native import compiled_kernels as c
from motet.engines.native.cpu import panels
from motet.engines.native.cpu.expert_reader import ExpertsRead
from motet.engines.native.cpu.memory import trim_heap
from motet.engines.native.cpu.model_reader import LayerRead, Product, Structure, read_structure
from motet.engines.native.cpu.norm_reader import NormRead, StructureError
from motet.engines.native.cpu.packed_experts import ExpertPacker, expert_shapes
from motet.engines.native.cpu.rotary_reader import RotaryRead
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.model_weights import names_of, tied_names


def structure_for(
    kernels: ctypes.CDLL | None,
    model: PreTrainedModel,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Structure | str:
    """Returns the structure of a model that the kernels can run, or the reason why they cannot run it. `kernels`: None
    if they are not available."""
    if kernels is None:
        return "the kernels were not built, or this processor has neither AVX-512 with bf16 nor AVX2 with FMA"
    if device.type != "cpu" or dtype not in panels.DTYPE_CODES:
        name = str(dtype).removeprefix("torch.")
        return f"they compute in bfloat16 or float32 on the CPU, not in {name} on {device.type}"
    try:
        structure = read_structure(model, max_positions=max_positions)
    except StructureError as error:
        return f"they do not implement {error}"
    return structure.unsupported_reason() or structure


class PackedModel:
    """Owns all memory that `struct` points to. `structure_for` must return a structure for the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        storage: KVStorage,
        *,
        max_positions: int,
        kernels: ctypes.CDLL,
        structure: Structure | None = None,
        int8: bool = False,
    ) -> None:
        """`structure`: structure of the model; None to read it from the model."""
        structure = structure or read_structure(model, max_positions=max_positions)
        self.locations: dict[str, panels.TensorLocation] = {}
        """Location of each tensor of the checkpoint, by its name."""
        self._names = names_of(model)
        self.tied = tied_names(self._names)
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        shapes = [(one.out_features, one.in_features) for one in linears] + expert_shapes(model)
        self._kernels = kernels
        self.dtype = storage.keys.dtype
        packer = panels.Packer(kernels, shapes, dtype=torch.int8 if int8 else self.dtype)
        self._packer = packer
        self.memory = panels.PackedMemory(packer.arena)
        self._storage = storage
        self._max_positions = max_positions
        self._tables: dict[RotaryRead, c.Rotary] = {}
        self._norms: dict[nn.Module, c.PackedNorm] = {}
        """Norms by their modules, because two parts of a layer can have the same norm."""
        layers = [self._layer(layer, i) for i, layer in enumerate(structure.layers)]
        self.layers = (c.Layer * len(layers))(*layers)
        embedding, head = structure.embedding, structure.head
        tied = head.weight.data_ptr() == embedding.weight.data_ptr()
        self.vocab_size: int = head.out_features
        self.struct = c.Model(
            num_layers=len(self.layers),
            hidden=embedding.embedding_dim,
            heads=structure.layers[0].attention.out.in_features // storage.keys.shape[3],
            kv_heads=storage.keys.shape[2],
            head_dim=storage.keys.shape[3],
            vocab=self.vocab_size,
            block_size=storage.block_size,
            dtype=panels.DTYPE_CODES[storage.keys.dtype],
            logit_softcap=structure.logit_softcap,
            logit_scale=structure.logit_scale,
            embedding_scale=structure.embedding_scale,
            layers=self.layers,
            embedding=None if tied else self._rows(embedding.weight),
            head=self._linear(Product([head])),
            final_norm=self._norm(structure.final_norm),
        )
        _empty(embedding)
        del self._packer  # it refers to the arena, which a twin must not keep alive

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
        location = self.locations[name]
        location.write(self.memory, tensor.detach().to("cpu", location.dtype))

    def numbers(self, name: str) -> list[Tensor]:
        """Returns the tensors that the model has in place of a tensor of the checkpoint."""
        return self.locations[name].read(self.memory)

    def _layer(self, layer: LayerRead, index: int) -> c.Layer:
        attention, mlp = layer.attention, layer.mlp
        scores = attention.scores
        return c.Layer(
            qkv=self._linear(attention.qkv),
            out=self._linear(Product([attention.out])),
            gate_up=c.PackedLinear() if mlp.up is None else self._linear(mlp.up, interleaved=mlp.gated),
            down=c.PackedLinear() if mlp.down is None else self._linear(Product([mlp.down])),
            experts=c.PackedExperts() if mlp.experts is None else self._pack_experts(mlp.experts),
            attention_norm=self._norm(attention.norm),
            mlp_norm=self._norm(mlp.norm),
            attention_post_norm=self._norm(attention.post_norm),
            mlp_post_norm=self._norm(mlp.post_norm),
            query_norm=self._norm(attention.query_norm),
            key_norm=self._norm(attention.key_norm),
            rotary=self._rotary(attention.rotary),
            sinks=None if scores.sinks is None else self._numbers(scores.sinks, scores.sinks.detach().float()),
            keys=self._storage.keys[index].data_ptr(),
            values=self._storage.values[index].data_ptr(),
            window=scores.window or 0,
            score_scale=scores.scale,
            score_softcap=scores.softcap or 0.0,
            residual_scale=layer.residual_scale,
            activation=mlp.activation,
            gated=mlp.gated,
            parallel=mlp.parallel,
            rotates_first=attention.rotates_first,
        )

    def _pack_experts(self, experts: ExpertsRead) -> c.PackedExperts:
        return ExpertPacker(self.memory, self._packer, self._locate, self._kernels).pack(experts)

    def _linear(self, product: Product, *, interleaved: bool = False) -> c.PackedLinear:
        """Packs products with the same input as one fused product. Columns of the weights are concatenated; with
        `interleaved`, 16 columns of one weight alternate with the same 16 columns of the other."""
        pieces = product.pieces(2 if interleaved else len(product.parts))
        weights = [part.weight.detach()[rows] for part, rows in pieces]
        packed = self._packer.pack(*(weights if interleaved else [torch.cat(weights)]))
        bias = None
        if any(part.bias is not None for part in product.parts):
            shape = (-1, c.PANEL // 2) if interleaved else (1, -1)
            bias = torch.cat([_bias_of(part)[rows].view(shape) for part, rows in pieces], dim=1)
        linear = c.PackedLinear(
            panels=self._keep(packed.numbers),
            scales=None if packed.scales is None else self._keep(packed.scales),
            bias=None if bias is None else self._keep(bias),
            columns=product.columns,
            depth=weights[0].shape[1],
            number=len(self.memory.products) + 1,
        )
        begin = 0
        places: dict[nn.Linear, list[panels.PackedPiece]] = {part: [] for part in product.parts}
        for side, ((part, rows), weight) in enumerate(zip(pieces, weights, strict=True)):
            columns = panels.Columns(0, side) if interleaved else panels.Columns(begin)
            places[part].append(panels.PackedPiece(rows, columns, len(weight)))
            begin += len(weight)
        for part, own in places.items():
            self._locate_product(part, own, with_bias=bias is not None and part.bias is not None)
        self.memory.products.append(packed)
        del weights
        trim_heap()  # otherwise the heap keeps the memory of the freed parameters
        return linear

    def _locate_product(self, part: nn.Linear, pieces: list[panels.PackedPiece], *, with_bias: bool) -> None:
        """Records where a weight and its bias are, and frees the weight."""
        number, kept = len(self.memory.products), len(self.memory.kept) - 1
        write = partial(panels.write_columns, kernels=self._kernels, product=number)
        read = partial(panels.read_columns, product=number)
        self._locate(
            part.weight,
            write=partial(panels.write_pieces, write=write, pieces=pieces),
            read=partial(panels.read_pieces, read=read, pieces=pieces),
            place=panels.LinearPlace(number + 1, pieces),
        )
        if with_bias:
            self._locate(
                part.bias,
                write=partial(panels.write_pieces, write=partial(panels.write_bias, kept=kept), pieces=pieces),
                read=partial(panels.read_pieces, read=partial(panels.read_bias, kept=kept), pieces=pieces),
            )
        _empty(part)

    def _rows(self, weight: Tensor) -> int:
        """Returns the address of embeddings [vocab_size, hidden]."""
        self.memory.rows.append(len(self.memory.kept))
        return self._numbers(weight, weight.detach())

    def _numbers(self, parameter: Tensor, numbers: Tensor, *, offset: float = 0.0) -> int:
        """Stores the values of a parameter plus `offset`, and returns their address."""
        kept = len(self.memory.kept)
        write = partial(panels.write_numbers, kept=kept, offset=offset)
        self._locate(parameter, write=write, read=partial(panels.read_numbers, kept=kept))
        return self._keep(numbers)

    def _locate(
        self,
        parameter: Tensor,
        *,
        write: panels.Write,
        read: panels.Read,
        place: panels.LinearPlace | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: dtype of the tensor; None for the dtype of the engine."""
        location = panels.TensorLocation(tuple(parameter.shape), write, read, dtype or self.dtype, place)
        for name in self._names[id(parameter)]:
            self.locations[name] = location

    def _rotary(self, rotary: RotaryRead | None) -> c.Rotary:
        if rotary is None:
            return c.Rotary()
        if rotary not in self._tables:
            cosines, sines = rotary.tables(range(self._max_positions))
            self._tables[rotary] = c.Rotary(self._keep(cosines), self._keep(sines), rotary.dims, rotary.adjacent)
        return self._tables[rotary]

    def _norm(self, norm: NormRead | None) -> c.PackedNorm:
        if norm is None:
            return c.PackedNorm()
        if norm.module not in self._norms:
            weight, bias = norm.weight, norm.bias
            if weight is None:
                factors = self._keep(torch.ones(norm.width))
            else:
                factors = self._numbers(weight, weight.detach().float() + norm.offset, offset=norm.offset)
            self._norms[norm.module] = c.PackedNorm(
                weight=factors,
                bias=None if bias is None else self._numbers(bias, bias.detach().float()),
                width=norm.width,
                stride=norm.stride,
                epsilon=norm.epsilon,
                centered=norm.centered,
            )
        return self._norms[norm.module]

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


def _bias_of(part: nn.Linear) -> Tensor:
    return torch.zeros(part.out_features) if part.bias is None else part.bias.detach().float()
