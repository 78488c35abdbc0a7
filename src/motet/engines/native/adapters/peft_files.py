"""Reads an adapter from a PEFT folder, or from a safetensors file in memory, and checks it.

    adapter_config.json          `peft_config`
    adapter_model.safetensors    base_model.model.<linear layer>.lora_A.weight  [rank, inputs]
                                 base_model.model.<linear layer>.lora_B.weight  [outputs, rank]

The files come from a trainer or from a hub and are not trusted: all names, shapes and sizes are checked before a tensor
is read, and then that its numbers are finite. An error names the file, and the tensor or field.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from motet.engine_orders import LoadAdapter
from motet.engines.native.adapters.low_rank import AdapterMaker, AdapterTensors, LowRank, unusable
from motet.engines.native.adapters.peft_config import PeftConfig, read_peft_config
from motet.engines.native.model_weights import NOT_FINITE, SAVED_DTYPES, is_finite
from motet.errors import ModelLoadError
from motet.log import cut
from motet.models.checkpoint import CheckpointKind
from motet.models.file_reading import FileReading
from motet.models.folder import read_object
from motet.models.safetensors_header import MAX_NAME_CHARS, Header, TensorEntry, check_safetensors

logger = logging.getLogger(__name__)

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PARTS = re.compile(r"(?:base_model\.model\.)?(?P<linear>.+)\.lora_(?P<side>[AB])(?:\.[\w-]+)?\.weight")
"""Names of tensors. Names that were not written by PEFT's `save_pretrained` can contain the name of the adapter."""
UNSUPPORTED_PARTS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "an adapter of embeddings",
    ".bias": "an adapter with biases",
}
"""Kinds of tensors that are not implemented, by a part of their names."""


@dataclass(frozen=True)
class _FileTensor:
    """A tensor in the file."""

    name: str
    """Names of the file and the tensor, for messages."""
    entry: TensorEntry


LayerTensors = dict[str, dict[str, _FileTensor]]
"""The tensors A and B of each linear layer, by its name."""


@dataclass(frozen=True)
class _Source:
    """The files of an adapter."""

    tensors: Path
    shown: str
    """Name of the file with the tensors, for messages."""
    config: PeftConfig


def read_adapter(order: LoadAdapter, maker: AdapterMaker, *, max_rank: int, served: Sequence[str]) -> AdapterTensors:
    """Reads the adapter of an order for the layers of `maker`. Raises RequestError if it cannot be used. `served`:
    names and paths of the base model; another name in the adapter's configuration only causes a warning."""
    reading = FileReading()
    try:
        source = reading.run(lambda: _source_of(order))
        header, data_begin = reading.run(lambda: check_safetensors(source.tensors, received_as=source.shown))
        names = {Path(name).name.lower() for name in served}
        if (base := source.config.base) and names and Path(base).name.lower() not in names:
            logger.warning("the adapter %s was trained for %s, and %s is served", order.name, base, served[0])
        layers = _layers_of(header, source)
        _check_layers(layers, maker, source=source, max_rank=max_rank)

        def read(tensor: _FileTensor) -> Tensor:
            numbers = torch.empty(tensor.entry.num_bytes, dtype=torch.uint8)
            begin = data_begin + tensor.entry.data_offsets[0]
            reading.read_into(numbers.numpy().data, source.tensors, begin=begin)
            return numbers.view(SAVED_DTYPES[tensor.entry.dtype]).view(tensor.entry.shape)

        return reading.run(lambda: _tensors(layers, read, config=source.config, dtype=maker.dtype))
    except (ModelLoadError, OSError) as error:
        raise unusable(str(error)) from error
    finally:
        reading.close()


def _source_of(order: LoadAdapter) -> _Source:
    path = Path(order.path)
    if order.kind is CheckpointKind.MEMORY:
        try:
            fields = json.loads(order.config)
        except (ValueError, RecursionError) as error:
            raise unusable(f"{CONFIG} is broken: {error}") from error
        if not isinstance(fields, dict):
            raise unusable(f"{CONFIG} is broken: it must be a JSON object")
        return _Source(path, TENSORS, read_peft_config(fields, CONFIG))
    config, tensors = path / CONFIG, path / TENSORS
    if not config.exists():
        raise unusable(f"{config} is missing: {path} is not the folder of a PEFT adapter")
    if not tensors.exists() and (path / PICKLE).exists():
        raise unusable(
            f"{path / PICKLE} can contain code, so it is not read: load the adapter with PEFT and save it with "
            f"save_pretrained, which writes {TENSORS}"
        )
    return _Source(tensors, str(tensors), read_peft_config(read_object(config), str(config)))


def _layers_of(header: Header, source: _Source) -> LayerTensors:
    """Returns the tensors of each linear layer. Raises RequestError for a tensor of another kind."""
    layers: LayerTensors = {}
    for name, entry in header.items():
        shown = f"{source.shown}: tensor {cut(name, MAX_NAME_CHARS)}"
        match = PARTS.fullmatch(name)
        if match is None:
            kind = next((kind for part, kind in UNSUPPORTED_PARTS.items() if part in name), "a part of modules_to_save")
            raise unusable(f"{shown}: it is {kind}, which is not implemented")
        if entry.dtype not in SAVED_DTYPES:
            raise unusable(f"{shown}: its dtype is {entry.dtype}; {', '.join(SAVED_DTYPES)} can be used")
        sides = layers.setdefault(match["linear"], {})
        if match["side"] in sides:
            raise unusable(f"{shown}: the file has another tensor for the same matrix")
        sides[match["side"]] = _FileTensor(shown, entry)
    if not layers:
        raise unusable(f"{source.shown} has no tensors")
    for linear, sides in layers.items():
        if missing := {"A", "B"} - sides.keys():
            raise unusable(f"{source.shown}: {cut(linear, MAX_NAME_CHARS)} has no tensor lora_{missing.pop()}")
    return layers


def _check_layers(layers: LayerTensors, maker: AdapterMaker, *, source: _Source, max_rank: int) -> None:
    """Compares the tensors with the layers of the model. Raises RequestError for the first tensor that is wrong."""
    config = source.config
    for linear, sides in layers.items():
        if (shape := maker.linears.get(linear)) is None:
            raise unusable(f"{sides['A'].name}: the model has no such linear layer")
        if not config.changes(linear):
            raise unusable(f"{sides['A'].name}: {config.source} does not name this layer in target_modules")
        if (why := maker.unsupported_reason(linear)) is not None:
            raise unusable(f"{sides['A'].name}: {why}")
        rank = config.rank_of(linear)
        if rank > max_rank:
            raise unusable(f"{sides['A'].name}: its rank is {rank}, and the maximum is {max_rank} (--max-adapter-rank)")
        for side, expected in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            tensor = sides[side]
            if tensor.entry.shape != expected:
                found = list(tensor.entry.shape)
                raise unusable(f"{tensor.name}: its shape is {found}, and must be {list(expected)} for rank {rank}")
    for linear in maker.linears:
        if linear not in layers and config.changes(linear) and maker.unsupported_reason(linear) is None:
            raise unusable(f"{source.shown}: the tensors of {linear}, which target_modules names, are missing")


def _tensors(
    layers: LayerTensors, read: Callable[[_FileTensor], Tensor], *, config: PeftConfig, dtype: torch.dtype
) -> AdapterTensors:
    parts: dict[str, LowRank] = {}
    digest = blake2b(digest_size=16)
    for linear in sorted(layers):
        scaling = config.scaling_of(linear)
        digest.update(f"{linear} {scaling!r}".encode())
        sides: dict[str, Tensor] = {}
        for side, factor in (("A", 1.0), ("B", scaling)):
            stored = layers[linear][side]
            numbers = read(stored)
            digest.update(f" {stored.entry.dtype} {stored.entry.shape} ".encode())
            digest.update(numbers.view(torch.uint8).numpy().data)
            sides[side] = _rounded(numbers, stored.name, factor=factor, dtype=dtype)
        parts[linear] = LowRank(sides["A"], sides["B"])
    return AdapterTensors(parts, digest.hexdigest(), max(config.rank_of(linear) for linear in parts))


def _rounded(numbers: Tensor, shown: str, *, factor: float, dtype: torch.dtype) -> Tensor:
    """Returns a tensor times a factor in the engine's dtype. Raises RequestError if a number is not finite."""
    rounded = (numbers.float() * factor).to(dtype)
    if is_finite(rounded):
        return rounded
    name = str(dtype).removeprefix("torch.")
    too_large = f"after scaling, it has numbers that are too large for {name}"
    raise unusable(f"{shown}: {too_large if is_finite(numbers) else NOT_FINITE}")
