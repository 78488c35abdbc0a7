"""Weights [rows, columns] with one scale, and possibly one zero point, for each block of rows and columns.

block             scales
(1, group)        [rows, columns / group]                     a group of a row
(1, columns)      [rows, 1] or [rows]                         a row, which is an output channel
(rows, columns)   [1], [1, 1] or []                           the entire tensor
(128, 128)        [rows / 128, columns / 128], rounded up     a square block
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.engines.native.quantized.stored_tensors import StoredTensor, pieces_of


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of a weight [rows, columns]."""

    rows: int
    columns: int
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    def check(self, scales: StoredTensor, dtypes: tuple[str, ...]) -> None:
        """Raises ModelLoadError unless `scales` has a scale for each block."""
        short: list[tuple[int, ...]] = [(self.rows,)] if self.shape[1] == 1 else []
        if self.shape == (1, 1):
            short = [(), (1,)]
        scales.check(dtypes, None if scales.shape in short else self.shape)

    def expanded(self, scales: Tensor, rows: slice) -> Tensor:
        """Returns the scale of each weight in these rows; one column if all weights of a row have the same scale."""
        grid = scales.reshape(self.shape)[torch.arange(rows.start, rows.stop) // self.block[0]]
        return grid if self.shape[1] == 1 else grid[:, torch.arange(self.columns) // self.block[1]]

    def write(
        self,
        out: Tensor,
        numbers: Callable[[slice], Tensor],
        *,
        scales: Tensor,
        zeros: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """Writes (numbers - zeros) * scales to `out`, computed in `dtype`. `numbers`: returns some rows."""
        for rows in pieces_of(self.rows, self.columns):
            piece = numbers(rows).to(dtype)
            if zeros is not None:
                piece = piece - self.expanded(zeros, rows).to(dtype)
            out[rows] = piece * self.expanded(scales, rows).to(dtype)
