"""The weights of a model that serves, and the memory into which new weights are written before they replace these.

There are two implementations: for models that torch's operators or the GPU's kernels run (`TensorWeights`, in this
file), and for models that the compiled kernels run (`cpu.cpu_runner.PackedWeights`).
"""

import copy
import math
import re
from bisect import bisect
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from motet.engines.native.cpu.memory import release_pages

SAVED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The dtypes of `models.safetensors_header.ITEM_BYTES`, by their safetensors names."""

BITS = {2: torch.int16, 4: torch.int32}
"""The integers with the size of a number, by its bytes."""
NOT_FINITE = "it has numbers that are NaN or infinite"


class StagedWeights(Protocol):
    """New weights that are being written to separate memory while the old weights serve."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor of the checkpoint, of the right shape, in the dtype of `ModelWeights.dtype_of`, and on any
        device."""
        ...

    def apply(self) -> None:
        """Replaces the weights that serve. Called once, between two steps. Must not fail."""
        ...


class ModelWeights(Protocol):
    """The weights of a model that serves."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in a checkpoint. Tied weights have two names."""
        ...

    @property
    def tied(self) -> list[list[str]]:
        """The names of each tensor that has several names."""
        ...

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype to which the numbers of a tensor are rounded: the dtype in which the model's own loader
        reads it."""
        ...

    def stage(self, *, complete: bool) -> StagedWeights:
        """Returns staged weights, initially a copy of the weights that serve. With `complete`, all tensors will be
        written, so they are not copied and their initial content is undefined."""
        ...

    def numbers(self, name: str) -> list[Tensor]:
        """Returns the engine's form of a tensor of the checkpoint: the tensor in the engine's dtype, or the numbers
        with which the engine computes (int8 and scales; the factors of a norm)."""
        ...

    def release_pages(self) -> None:
        """Releases the memory of large weights to the system. Complete staged weights must be applied before a run."""
        ...


@dataclass(frozen=True)
class Slot:
    """A tensor of the running model, or a part of a tensor, that a tensor of the checkpoint fills."""

    numbers: Tensor
    more: float = 0.0
    """Added to the numbers of the checkpoint."""
    dtype: torch.dtype | None = None
    """Dtype in which the model's own loader reads the tensor; None if it is the dtype of the numbers."""


class TensorWeights:
    """Weights that torch's operators or the GPU's kernels read. Recorded graphs contain their addresses, so they are
    not moved: staged weights are stored on the device and copied over the old weights."""

    def __init__(self, slots: Mapping[str, Slot], *, tied: list[list[str]]) -> None:
        self._slots = slots
        self.shapes = {name: tuple(slot.numbers.shape) for name, slot in slots.items()}
        self.tied = tied

    @classmethod
    def of(cls, model: nn.Module) -> "TensorWeights":
        """Returns the weights of a model that has the parameters of the checkpoint."""
        slots = {name: Slot(tensor.detach()) for name, tensor in saved_tensors(model).items()}
        return cls(slots, tied=tied_names(names_of(model)))

    def dtype_of(self, name: str) -> torch.dtype:
        slot = self._slots[name]
        return slot.dtype or slot.numbers.dtype

    def stage(self, *, complete: bool) -> "StagedTensors":
        return StagedTensors(self._slots)

    def numbers(self, name: str) -> list[Tensor]:
        return [self._slots[name].numbers]

    def release_pages(self) -> None:
        for slot in self._slots.values():
            release_pages(slot.numbers)


class StagedTensors:
    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = slots
        self._written: list[tuple[Slot, Tensor]] = []

    def write(self, name: str, tensor: Tensor) -> None:
        slot = self._slots[name]
        rounded = tensor.to(slot.numbers.device, slot.numbers.dtype, copy=True)
        self._written.append((slot, rounded + slot.more if slot.more else rounded))

    @torch.no_grad()
    def apply(self) -> None:
        for slot, tensor in self._written:
            slot.numbers.copy_(tensor)


@dataclass(frozen=True)
class PublishedPart:
    """A tensor of published checkpoints that is a part of a tensor of the model, or the complete tensor."""

    whole: str
    """Name of the model's tensor."""
    begin: int
    """Number of the model's rows before the part. A row is a sequence of numbers along the last dimension."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PublishedForm:
    """Differences between the tensors of a model and of its published checkpoints. For instance, a checkpoint has a
    tensor for each expert, and the model one tensor for all experts."""

    parts: Mapping[str, PublishedPart] = field(default_factory=dict)
    """Parts of the model's tensors, by their names in published checkpoints."""
    buffers: frozenset[str] = frozenset()
    """Names of tensors that are not parameters. Trainers do not send them, and they keep their numbers then."""
    unused: re.Pattern[str] | None = None
    """Names of tensors that checkpoints of the family have and its models do not need, such as layers that predict
    several tokens."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "PublishedForm":
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = frozenset(saved_tensors(model).keys() - parameters.keys())
        unused = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
        return cls(_published_parts(model), buffers, re.compile("|".join(unused)) if unused else None)

    def whole_names(self, names: Iterable[str]) -> set[str]:
        """Returns the names of the model's tensors for names of a checkpoint."""
        return {self.parts[name].whole if name in self.parts else name for name in names}

    def missing_parts(self, names: Container[str], whole: str) -> list[str]:
        """Returns the parts of a tensor of the model that are not in `names`."""
        return [name for name, part in self.parts.items() if part.whole == whole and name not in names]

    def merged(
        self, tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's tensors, given a checkpoint's tensors. All parts of a tensor must be among them."""
        rest = Counter(part.whole for part in self.parts.values())
        unfinished: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if (part := self.parts.get(name)) is None:
                yield name, tensor
                continue
            if part.whole not in unfinished:
                unfinished[part.whole] = torch.empty(shapes[part.whole], dtype=tensor.dtype)
            rows = unfinished[part.whole].view(-1, tensor.shape[-1])
            rows[part.begin : part.begin + tensor.numel() // tensor.shape[-1]] = tensor.view(-1, tensor.shape[-1])
            rest[part.whole] -= 1
            if not rest[part.whole]:
                yield part.whole, unfinished.pop(part.whole)


def _published_parts(model: PreTrainedModel) -> dict[str, PublishedPart]:
    """Converts tensors that contain their own numbers of rows to the published form, with the conversion of
    transformers. Experts are converted with few columns each, because their rows would need much memory."""
    if not get_model_conversion_mapping(model, add_legacy=False):
        return {}
    saved, rows = saved_tensors(model), {}
    begins: list[int] = []
    begin = 0
    for name, tensor in saved.items():
        shape = (len(tensor), 2, 1) if tensor.dim() == 3 and tensor.shape[1] % 2 == 0 else (1,)
        rows[name] = torch.arange(begin, begin + math.prod(shape)).view(shape)
        begins.append(begin)
        begin += math.prod(shape)
    names, unconverted = list(saved), copy.copy(model)
    vars(unconverted)["_weight_conversions"] = None  # the conversions of the checkpoint that was loaded
    parts: dict[str, PublishedPart] = {}
    for name, converted in revert_weight_conversion(unconverted, rows).items():
        first = int(converted.flatten()[0])
        number = bisect(begins, first) - 1
        whole, start = names[number], begins[number]
        if name == whole:
            continue
        tensor = saved[whole]
        if rows[whole].dim() == 1 or converted.shape == rows[whole].shape:
            parts[name] = PublishedPart(whole, 0, tuple(tensor.shape))
            continue
        unit = tensor.shape[1] // 2
        parts[name] = PublishedPart(whole, (first - start) * unit, (converted.numel() * unit, tensor.shape[2]))
    return parts


def is_finite(numbers: Tensor) -> bool:
    """Returns True unless a number is NaN or infinite. Takes 30 ms for 270 MB."""
    if not numbers.numel():
        return True
    if numbers.device.type != "cpu":
        lowest, highest = torch.aminmax(numbers)  # NaN if any number is NaN
        return bool(torch.isfinite(lowest) & torch.isfinite(highest))
    # NaN and infinity are the largest values of each sign when they are read as integers. numpy is used because the
    # threads of torch wait for the engine's threads.
    infinity = torch.tensor(torch.inf, dtype=numbers.dtype).view(BITS[numbers.itemsize]).item()
    bits = numbers.contiguous().view(BITS[numbers.itemsize]).numpy()
    sign = 1 << (8 * numbers.itemsize - 1)
    return bool(bits.max() < infinity and bits.view(f"u{numbers.itemsize}").max() < infinity + sign)


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a model that a checkpoint contains, by their names: parameters, and buffers such as the
    corrections of routers. A tied parameter has two names."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_floating_point()}


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each tensor in a checkpoint, by the tensor's id."""
    names: dict[int, list[str]] = {}
    for name, tensor in saved_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def tied_names(names: Mapping[int, list[str]]) -> list[list[str]]:
    return [several for several in names.values() if len(several) > 1]
