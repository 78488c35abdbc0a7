"""Types for adapters that the engine's parts exchange."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from motet.engine_info import AdapterInfo
from motet.errors import RequestError

INVALID_ADAPTER = "invalid_adapter"
"""Error code for an adapter that cannot be used."""
Shape = tuple[int, int]
"""Outputs and inputs of a linear layer."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """The change of one linear layer."""

    down: Tensor
    """[rank, inputs], in the engine's dtype."""
    up: Tensor
    """[outputs, rank], in the engine's dtype, multiplied by the scaling of the adapter."""


@dataclass(frozen=True, eq=False)
class AdapterTensors:
    """An adapter as read from its files."""

    parts: Mapping[str, LowRank]
    """The change of each linear layer, by the name of the layer in the model."""
    digest: str
    """Digest of all tensors, their names and their scaling."""
    rank: int
    """The highest rank of all layers."""


class AdapterMaker(Protocol):
    """Converts adapters for the runner of a backend."""

    @property
    def linears(self) -> Mapping[str, Shape]:
        """Shape of each linear layer of the model, by name."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices of `LowRank`."""
        ...

    def unsupported_reason(self, linear: str) -> str | None:
        """Returns the reason why the backend does not support adapters of a linear layer; None if it does."""
        ...

    def make(self, parts: Mapping[str, LowRank]) -> object:
        """Returns the adapter in the form that the runner needs. Called in a thread, while the engine runs steps."""
        ...


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """An adapter of an engine. Groups that use it hold references to it."""

    info: AdapterInfo
    weights: object
    """Result of `AdapterMaker.make`, for the runner of the same backend."""


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """Rows [begin, end) of a step that are computed with an adapter."""

    begin: int
    end: int
    adapter: ServedAdapter


def unusable(message: str) -> RequestError:
    """Returns the error for an adapter that cannot be used. `message` names the file, and the tensor or field."""
    return RequestError(message, param="lora_path", code=INVALID_ADAPTER)
