"""The weights of a model that serves, and the memory into which new weights are written before they replace these.

There are two implementations: for models that torch's operators or the GPU's kernels run (`TensorWeights`, in this
file), and for models that the compiled kernels run (`cpu.cpu_runner.PackedWeights`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from motet.engines.native.cpu.memory import release_pages

SAVED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The dtypes of `models.safetensors_header.ITEM_BYTES`, by their safetensors names."""

BITS = {2: torch.int16, 4: torch.int32}
"""The integers with the size of a number, by its bytes."""
NOT_FINITE = "it has numbers that are NaN or infinite"


class StagedWeights(Protocol):
    """New weights that are being written to separate memory while the old weights serve."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor of the checkpoint, of the right shape, in any dtype and on any device."""
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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which the numbers of a checkpoint are rounded."""
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


class TensorWeights:
    """Weights that torch's operators or the GPU's kernels read. Recorded graphs contain their addresses, so they are
    not moved: staged weights are stored on the device and copied over the old weights."""

    def __init__(self, slots: Mapping[str, Slot], *, tied: list[list[str]], dtype: torch.dtype) -> None:
        """`dtype`: the dtype in which the model's own loader reads a checkpoint."""
        self._slots = slots
        self.dtype = dtype
        self.shapes = {name: tuple(slot.numbers.shape) for name, slot in slots.items()}
        self.tied = tied

    @classmethod
    def of(cls, model: nn.Module) -> "TensorWeights":
        """Returns the weights of a model that has the parameters of the checkpoint."""
        parameters = model.named_parameters(remove_duplicate=False)
        slots = {name: Slot(parameter.detach()) for name, parameter in parameters}
        return cls(slots, tied=tied_names(names_of(model)), dtype=next(model.parameters()).dtype)

    def stage(self, *, complete: bool) -> "StagedTensors":
        return StagedTensors(self._slots, self.dtype)

    def numbers(self, name: str) -> list[Tensor]:
        return [self._slots[name].numbers]

    def release_pages(self) -> None:
        for slot in self._slots.values():
            release_pages(slot.numbers)


class StagedTensors:
    def __init__(self, slots: Mapping[str, Slot], dtype: torch.dtype) -> None:
        self._slots = slots
        self._dtype = dtype
        self._written: list[tuple[Slot, Tensor]] = []

    def write(self, name: str, tensor: Tensor) -> None:
        slot = self._slots[name]
        rounded = tensor.to(slot.numbers.device, self._dtype, copy=True).to(slot.numbers.dtype)
        self._written.append((slot, rounded + slot.more if slot.more else rounded))

    @torch.no_grad()
    def apply(self) -> None:
        for slot, tensor in self._written:
            slot.numbers.copy_(tensor)


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


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each parameter in a checkpoint, by the parameter's id. A tied parameter has two."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def tied_names(names: Mapping[int, list[str]]) -> list[list[str]]:
    return [several for several in names.values() if len(several) > 1]
