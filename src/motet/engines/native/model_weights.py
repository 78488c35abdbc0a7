"""The weights of a model that serves, and the memory into which new ones are written before they take their place.

Two kinds of models have them: those that torch's operators or the GPU's kernels run (`TensorWeights`, here), and those
that the compiled kernels run (`cpu.cpu_runner.PackedWeights`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from motet.engines.native.memory import release_pages


class StagedWeights(Protocol):
    """Weights that are being written next to those that serve."""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor of the checkpoint, of the right shape, in any dtype and on any device."""
        ...

    def apply(self) -> None:
        """Puts them in the place of those that serve. Called once, between two steps. It does not fail."""
        ...


class ModelWeights(Protocol):
    """The weights of a model that serves."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in a checkpoint. Tied weights have two names."""
        ...

    @property
    def tied(self) -> list[list[str]]:
        """The names of each tensor that has several."""
        ...

    def stage(self, *, complete: bool) -> StagedWeights:
        """Returns staged weights that start as a copy of those that serve. If all of them will be written, `complete`
        leaves out the copy, and they start with any content."""
        ...

    def numbers(self, name: str) -> list[torch.Tensor]:
        """Returns what the engine has in the place of a tensor of the checkpoint: the tensor in the engine's dtype, or
        what it computes with (int8 and scales; the factors of a norm)."""
        ...

    def release_pages(self) -> None:
        """Releases their memory to the system. Complete staged weights must be applied before the next run."""
        ...


@dataclass(frozen=True)
class Slot:
    """A tensor of the running model, or a part of one, that a tensor of the checkpoint fills."""

    numbers: torch.Tensor
    more: float = 0.0
    """Added to the numbers of the checkpoint."""


class TensorWeights:
    """Weights that torch's operators or the GPU's kernels read. Recorded graphs know their addresses, so they stay
    where they are: staged ones wait on the device and are copied over them."""

    def __init__(self, slots: Mapping[str, Slot], *, tied: list[list[str]], dtype: torch.dtype) -> None:
        """`dtype`: the dtype in which the model's own loader reads a checkpoint."""
        self._slots = slots
        self._dtype = dtype
        self.shapes = {name: tuple(slot.numbers.shape) for name, slot in slots.items()}
        self.tied = tied

    @classmethod
    def of(cls, model: nn.Module) -> "TensorWeights":
        """Returns the weights of a model that has the parameters of the checkpoint."""
        slots = {name: Slot(one.detach()) for name, one in model.named_parameters(remove_duplicate=False)}
        return cls(slots, tied=tied_names(names_of(model)), dtype=next(model.parameters()).dtype)

    def stage(self, *, complete: bool) -> "StagedTensors":
        return StagedTensors(self._slots, self._dtype)

    def numbers(self, name: str) -> list[torch.Tensor]:
        return [self._slots[name].numbers]

    def release_pages(self) -> None:
        for slot in self._slots.values():
            release_pages(slot.numbers)


class StagedTensors:
    def __init__(self, slots: Mapping[str, Slot], dtype: torch.dtype) -> None:
        self._slots = slots
        self._dtype = dtype
        self._written: list[tuple[Slot, torch.Tensor]] = []

    def write(self, name: str, tensor: torch.Tensor) -> None:
        slot = self._slots[name]
        rounded = tensor.to(slot.numbers.device, self._dtype, copy=True).to(slot.numbers.dtype)
        self._written.append((slot, rounded + slot.more if slot.more else rounded))

    @torch.no_grad()
    def apply(self) -> None:
        for slot, tensor in self._written:
            slot.numbers.copy_(tensor)


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each parameter in a checkpoint, by the parameter's id. A tied parameter has two."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def tied_names(names: Mapping[int, list[str]]) -> list[list[str]]:
    return [several for several in names.values() if len(several) > 1]
