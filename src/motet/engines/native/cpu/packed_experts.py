"""Packs the experts of a layer for the compiled kernels. The panels of all experts are one product, one expert after
the other, and each expert's gate and up alternate as in a dense layer."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from motet.engines.native import compiled_kernels as c
from motet.engines.native.cpu import panels
from motet.engines.native.cpu.expert_reader import CORRECTION, ExpertsRead
from motet.engines.native.cpu.memory import trim_heap
from motet.engines.native.cpu.panels import Columns, PackedMemory, Packer, Panels, read_weight, write_weight


class Locate(Protocol):
    def __call__(
        self, parameter: Tensor, *, write: panels.Write, read: panels.Read, dtype: torch.dtype | None = None
    ) -> None:
        """Records the location of a tensor of the checkpoint."""
        ...


@dataclass(frozen=True, eq=False)
class ExpertPacker:
    """Packs the experts of all layers into the memory of a model."""

    memory: PackedMemory
    packer: Packer
    locate: Locate
    kernels: ctypes.CDLL

    def pack(self, read: ExpertsRead) -> c.PackedExperts:
        """Removes the weights from the modules."""
        routing = read.routing
        return c.PackedExperts(
            router=self._router(read),
            gate_up=self._products(read, "gate_up"),
            down=self._products(read, "down"),
            correction=None if read.correction is None else self._correction(read),
            count=read.count,
            per_row=routing.per_row,
            groups=routing.groups,
            top_groups=routing.top_groups,
            scoring=routing.scoring,
            shared=0 if read.shared_gate is None else shared_column(len(read.router.weight)),
            min_total=routing.min_total,
            scale=routing.scale,
            limit=read.limit,
            alpha=read.alpha,
        )

    def _router(self, read: ExpertsRead) -> c.PackedLinear:
        """Packs the router, and the shared expert's gate as a further column, in float32: nearly equal scores would be
        equal in bfloat16."""
        weight: Tensor = read.router.weight
        columns, depth = weight.shape
        parts = [(weight, Columns(0))]
        if read.shared_gate is not None:
            parts.append((read.shared_gate.weight, Columns(shared_column(columns))))
        columns = parts[-1][1].begin + len(parts[-1][0])
        product = len(self.memory.products)
        fused = Panels(torch.zeros(panels.num_panels(columns), depth, c.PANEL), None)
        self.memory.products.append(fused)
        address = self._keep(fused.numbers)
        bias = getattr(read.router, "bias", None)
        for part, place in parts:
            write = partial(write_router, kernels=self.kernels, product=product, columns=place)
            of_part = partial(panels.read_columns, product=product, columns=place, count=len(part))
            self._locate(part, write=write, read=of_part)
        return c.PackedLinear(
            panels=address,
            bias=None if bias is None else self._bias(bias, torch.zeros(len(fused.numbers) * c.PANEL)),
            columns=columns,
            depth=depth,
        )

    def _bias(self, bias: Tensor, to: Tensor) -> int:
        """Keeps the bias of a router in a longer tensor of zeros."""
        kept, columns = len(self.memory.kept), Columns(0)
        address = self._keep(to)
        self._locate(
            bias,
            write=partial(panels.write_bias, kept=kept, columns=columns),
            read=partial(panels.read_bias, kept=kept, columns=columns, count=len(bias)),
        )
        return address

    def _correction(self, read: ExpertsRead) -> int:
        [correction] = [
            one for name, one in read.router.state_dict(keep_vars=True).items() if name.endswith(CORRECTION)
        ]
        kept = len(self.memory.kept)
        address = self._keep(torch.zeros(correction.numel()))
        self._locate(
            correction,
            write=partial(write_correction, kept=kept),
            read=partial(panels.read_numbers, kept=kept),
        )
        return address

    def _products(self, read: ExpertsRead, name: str) -> c.PackedLinear:
        """Packs a product of all experts, `gate_up` or `down`."""
        weight: nn.Parameter = getattr(read.experts, f"{name}_proj")
        bias: nn.Parameter | None = getattr(read.experts, f"{name}_proj_bias", None)
        count, (columns, depth) = len(weight), read.columns(weight[0]).shape
        fused = self.packer.unwritten(count * columns, depth)
        layout = ExpertLayout(read, gated=name == "gate_up")
        product = len(self.memory.products)
        self.memory.products.append(fused)
        address = self._keep(fused.numbers)
        scales = None if fused.scales is None else self._keep(fused.scales)
        self._locate(
            weight,
            write=partial(layout.write, kernels=self.kernels, product=product),
            read=partial(layout.read, product=product),
        )
        packed = c.PackedLinear(panels=address, scales=scales, columns=count * columns, depth=depth)
        if bias is not None:
            kept = len(self.memory.kept)
            packed.bias = self._keep(torch.zeros(count * columns))
            self._locate(bias, write=partial(layout.write_bias, kept=kept), read=partial(layout.read_bias, kept=kept))
        setattr(read.experts, f"{name}_proj", nn.Parameter(torch.empty(0), requires_grad=False))
        trim_heap()
        return packed

    def _locate(self, parameter: Tensor, *, write: panels.Write, read: panels.Read) -> None:
        self.locate(parameter, write=write, read=read, dtype=parameter.dtype)
        write(self.memory, parameter.detach())

    def _keep(self, tensor: Tensor) -> int:
        self.memory.kept.append(tensor)
        return tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """The order of a weight [experts, columns, depth] or a bias [experts, columns] of the checkpoint, which can be
    transposed."""

    experts: ExpertsRead
    gated: bool
    """True for the columns of gate and up."""

    def write(self, memory: PackedMemory, weight: Tensor, *, kernels: ctypes.CDLL, product: int) -> None:
        fused = memory.products[product]
        for index, one in enumerate(weight):
            part = fused.part(index, len(weight))
            for numbers, columns in self._parts(self.experts.columns(one)):
                write_weight(part, numbers, kernels=kernels, columns=columns)

    def read(self, memory: PackedMemory, *, product: int) -> list[Tensor]:
        """Returns the weight; for int8 also the scales of its columns."""
        fused, count = memory.products[product], self.experts.count
        columns, depth = len(fused.numbers) * c.PANEL // count, fused.numbers.shape[1]
        shape = (count, depth, columns) if self.experts.experts.is_transposed else (count, columns, depth)
        weight, scales = torch.empty(shape, dtype=fused.numbers.dtype), torch.empty(count, columns)
        for index in range(count):
            targets = zip(self._parts(self.experts.columns(weight[index])), self._parts(scales[index]), strict=True)
            for (numbers, place), (scale, _) in targets:
                found = read_weight(fused.part(index, count), columns=place, count=len(numbers))
                for target, source in zip((numbers, scale), found, strict=False):
                    target.copy_(source)
        return [weight] if fused.scales is None else [weight, scales]

    def write_bias(self, memory: PackedMemory, bias: Tensor, *, kept: int) -> None:
        for part, numbers in self._biases(memory.kept[kept].view(len(bias), -1), bias):
            part.copy_(numbers)

    def read_bias(self, memory: PackedMemory, *, kept: int) -> list[Tensor]:
        fused = memory.kept[kept].view(self.experts.count, -1)
        bias = torch.empty_like(fused)
        for part, numbers in self._biases(fused, bias):
            numbers.copy_(part)
        return [bias]

    def _parts(self, columns: Tensor) -> list[tuple[Tensor, Columns]]:
        """Returns the parts of an expert's columns, with their places in its panels."""
        if not self.gated:
            return [(columns, Columns(0))]
        gate, up = self.experts.gate_and_up(columns)
        return [(gate, Columns(0, 0)), (up, Columns(0, 1))]

    def _biases(self, fused: Tensor, bias: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields views of corresponding parts of the packed bias and of the bias, both [experts, columns]."""
        if not self.gated:
            yield fused, bias
            return
        halves = fused.view(len(bias), -1, 2, c.PANEL // 2)
        for side, part in enumerate(self.experts.gate_and_up(bias.t())):
            yield halves[:, :, side], part.t().view(len(bias), -1, c.PANEL // 2)


def expert_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Returns [columns, depth] of the products of all experts of each layer."""
    return [(one.shape[0] * one.shape[1], one.shape[2]) for one in model.parameters() if one.dim() == 3]


def shared_column(num_experts: int) -> int:
    """Returns the router's column for the gate of the shared expert: the first of the next half panel."""
    lanes = c.PANEL // 2
    return -(-num_experts // lanes) * lanes


def write_router(memory: PackedMemory, weight: Tensor, *, kernels: ctypes.CDLL, product: int, columns: Columns) -> None:
    panels.write_columns(memory, weight.float(), kernels=kernels, product=product, columns=columns)


def write_correction(memory: PackedMemory, correction: Tensor, *, kept: int) -> None:
    memory.kept[kept].copy_(correction.flatten())
