"""Computes adapters with torch's operators: hooks on linear layers add the low-rank products to the rows of adapters.

Rows are padded to a multiple of 4, as in all products with torch's operators (`step.inputs`). The result is then
batch-invariant: the bits of a row do not depend on the number of other rows. On machines where this is not enough, rows
are multiplied 4 at a time.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.engines.native.adapters.low_rank import AdapterRows, LowRank, Shape
from motet.engines.native.step.inputs import ROW_MULTIPLE

EXPERT = re.compile(r"(^|\.)experts(\.|$)")
CHECKED_ROWS, CHECKED_COUNTS = 32, (4, 12)
"""Numbers of rows, all and some of them, whose results are compared bit for bit."""


def linears_of(model: PreTrainedModel) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def unsupported_reason_of(model: PreTrainedModel, linear: str) -> str | None:
    """Returns the reason why no backend supports adapters of a linear layer; None if a backend can support them."""
    if model.get_submodule(linear) is model.get_output_embeddings():  # type: ignore[no-untyped-call]
        return "adapters of the output embedding are not implemented"
    if EXPERT.search(linear):
        return "adapters of experts are not implemented"
    return None


@dataclass(frozen=True, eq=False)
class LinearAdapter:
    """The low-rank changes of an adapter, by the name of the linear layer."""

    parts: Mapping[str, LowRank]
    batch_invariant: bool
    """True if the bits of a row do not depend on the number of rows, for multiples of 4."""


@dataclass(frozen=True)
class _Rows:
    """The rows of one adapter in a step."""

    adapter: LinearAdapter
    index: Tensor
    """Indices of the rows in the step."""
    padded: Tensor
    """The same indices, padded to a multiple of 4 with the last index."""


class LinearAdapters:
    """Makes adapters, and computes them in the steps of a `TorchRunner`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules = linears_of(model)
        self.linears: Mapping[str, Shape] = {
            name: (module.out_features, module.in_features) for name, module in self._modules.items()
        }
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._hooked: set[str] = set()
        self._step: list[_Rows] = []
        self._num_rows = 0
        self._other_rows: set[str] = set()
        """Linear layers that did not get all rows in the first step, which compares the model (`checks.reference`)."""
        self._counters = [
            module.register_forward_pre_hook(partial(self._count, name)) for name, module in self._modules.items()
        ]

    def unsupported_reason(self, linear: str) -> str | None:
        if (why := unsupported_reason_of(self._model, linear)) is None and linear in self._other_rows:
            return "the layer does not compute all rows of a step"
        return why

    def make(self, parts: Mapping[str, LowRank]) -> LinearAdapter:
        device = self._model.device
        moved = {name: LowRank(part.down.to(device), part.up.to(device)) for name, part in parts.items()}
        return LinearAdapter(moved, batch_invariant=device.type != "cpu" or _is_batch_invariant(moved.values()))

    @contextmanager
    def step(self, rows: Sequence[AdapterRows], *, num_rows: int) -> Iterator[None]:
        """Adds the adapters of a step to the layers, inside `with`. `num_rows`: rows of the step, with padding."""
        self._num_rows = num_rows
        if rows:
            self._start(rows)
        try:
            yield
        finally:
            self._step = []
            for counter in self._counters:
                counter.remove()
            self._counters.clear()

    def _start(self, rows: Sequence[AdapterRows]) -> None:
        by_adapter: dict[int, list[int]] = {}
        adapters: dict[int, LinearAdapter] = {}
        for one in rows:
            adapter = one.adapter.weights
            assert isinstance(adapter, LinearAdapter)
            adapters[id(adapter)] = adapter
            by_adapter.setdefault(id(adapter), []).extend(range(one.begin, one.end))
        self._step = [self._rows_of(adapters[key], numbers) for key, numbers in by_adapter.items()]
        for adapter in adapters.values():
            for name in adapter.parts.keys() - self._hooked:
                self._modules[name].register_forward_hook(partial(self._add, name))
                self._hooked.add(name)

    def _rows_of(self, adapter: LinearAdapter, numbers: list[int]) -> _Rows:
        padded = numbers + numbers[-1:] * (-len(numbers) % ROW_MULTIPLE)
        index = torch.tensor(padded, device=self._model.device)
        return _Rows(adapter, index[: len(numbers)], index)

    def _add(self, name: str, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:  # sizes: torch calls it
        for rows in self._step:
            if (part := rows.adapter.parts.get(name)) is None:
                continue
            x = args[0].flatten(0, -2).index_select(0, rows.padded)
            change = product(x, part, batch_invariant=rows.adapter.batch_invariant)
            output.view(self._num_rows, -1).index_add_(0, rows.index, change[: len(rows.index)])

    def _count(self, name: str, module: nn.Module, args: tuple[Tensor]) -> None:  # sizes: torch calls it
        if args[0].shape[:-1].numel() != self._num_rows:
            self._other_rows.add(name)


def product(x: Tensor, part: LowRank, *, batch_invariant: bool) -> Tensor:
    """Returns x A^T B^T, [rows, outputs]. The number of rows is a multiple of 4. `batch_invariant`: see
    `LinearAdapter`."""
    if batch_invariant:
        return F.linear(F.linear(x, part.down), part.up)
    return torch.cat([product(some, part, batch_invariant=True) for some in torch.split(x, ROW_MULTIPLE)])


@torch.inference_mode()
def _is_batch_invariant(parts: Iterable[LowRank]) -> bool:
    """Returns True if, for every shape of the matrices, a row has the same bits for different numbers of rows."""
    generator, checked = torch.Generator().manual_seed(0), set()
    for part in parts:
        shape = part.up.shape, part.down.shape
        if shape in checked:
            continue
        checked.add(shape)
        up, down, x = (
            torch.randn(size, generator=generator).to(part.up.dtype)
            for size in (*shape, (CHECKED_ROWS, part.down.shape[1]))
        )
        some = LowRank(down, up)
        full = product(x, some, batch_invariant=True)
        for count in CHECKED_COUNTS:
            if not torch.equal(product(x[4 : 4 + count], some, batch_invariant=True), full[4 : 4 + count]):
                return False
    return True
