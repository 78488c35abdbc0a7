"""Computes adapters with torch's operators: hooks on linear layers add the low-rank part to the rows of each adapter.

As in all products of torch's operators, rows are padded to a multiple of 4 (`step.inputs`), so that the bits of a row
do not depend on the other rows with the same adapter. If that does not suffice on a machine, rows are multiplied 4 at a
time.
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
"""Numbers of rows for which the results of a row are compared bit for bit."""


def linears_of(model: PreTrainedModel) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def obstacle_of(model: PreTrainedModel, linear: str) -> str | None:
    """Returns the reason why no backend can change a linear layer of a model; None if there is no such reason."""
    if model.get_submodule(linear) is model.get_output_embeddings():  # type: ignore[no-untyped-call]
        return "adapters of the output embedding are not implemented"
    if EXPERT.search(linear):
        return "adapters of experts are not implemented"
    return None


@dataclass(frozen=True, eq=False)
class LinearAdapter:
    """The parts of an adapter, by the name of the linear layer."""

    parts: Mapping[str, LowRank]
    alike: bool
    """True if a row has the same bits among any number of rows that is a multiple of 4."""


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
        """Linear layers that did not compute all rows in the first step, in which the model is compared."""
        self._counters = [
            module.register_forward_pre_hook(partial(self._count, name)) for name, module in self._modules.items()
        ]

    def obstacle(self, linear: str) -> str | None:
        if (why := obstacle_of(self._model, linear)) is None and linear in self._other_rows:
            return "the layer computes other rows than the model's"
        return why

    def make(self, parts: Mapping[str, LowRank]) -> LinearAdapter:
        device = self._model.device
        moved = {name: LowRank(part.down.to(device), part.up.to(device)) for name, part in parts.items()}
        return LinearAdapter(moved, alike=device.type != "cpu" or _rows_are_alike(moved.values()))

    @contextmanager
    def step(self, rows: Sequence[AdapterRows], *, num_rows: int) -> Iterator[None]:
        """Computes rows with adapters inside `with`. `num_rows`: number of rows of the step, with padding."""
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
            change = product(x, part, alike=rows.adapter.alike)
            output.view(self._num_rows, -1).index_add_(0, rows.index, change[: len(rows.index)])

    def _count(self, name: str, module: nn.Module, args: tuple[Tensor]) -> None:  # sizes: torch calls it
        if args[0].shape[:-1].numel() != self._num_rows:
            self._other_rows.add(name)


def product(x: Tensor, part: LowRank, *, alike: bool) -> Tensor:
    """Returns x A^T B^T, [rows, outputs]. The number of rows is a multiple of 4."""
    if alike:
        return F.linear(F.linear(x, part.down), part.up)
    return torch.cat([product(some, part, alike=True) for some in torch.split(x, ROW_MULTIPLE)])


@torch.inference_mode()
def _rows_are_alike(parts: Iterable[LowRank]) -> bool:
    """Returns True if, for every shape of a part, a row has the same bits among different numbers of rows."""
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
        full = product(x, some, alike=True)
        for count in CHECKED_COUNTS:
            if not torch.equal(product(x[4 : 4 + count], some, alike=True), full[4 : 4 + count]):
                return False
    return True
