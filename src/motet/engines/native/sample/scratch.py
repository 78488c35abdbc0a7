"""Where logits are worked on: float32 copies of some rows, padded to whole blocks with tokens of logit -inf.

The memory is taken once. A fresh 25 MB tensor a step costs more in page faults than the arithmetic on it, and a copy
that stays small stays in the cache.
"""

from collections.abc import Sequence

import torch

from motet.engines.native.sample.inverse_cdf import BLOCK
from motet.engines.native.sample.upload import uploaded_ids

_CPU_ELEMENTS = 2**21  # 8 MB: 42 rows of a vocabulary of 49,152
_GPU_ELEMENTS = 2**25


class Scratch:
    """Holds up to `capacity` rows; what `load` returned is overwritten by the next `load`."""

    def __init__(self, vocab_size: int, device: torch.device, *, max_rows: int | None = None) -> None:
        width = -(-vocab_size // BLOCK) * BLOCK
        elements = _CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS
        fitting = elements // width
        self.capacity = max(1, fitting if max_rows is None else min(fitting, max_rows))
        self._vocab_size = vocab_size
        self._x = torch.empty(self.capacity, width, device=device)
        self._y = torch.empty_like(self._x)

    def load(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """`logits[rows]` [len(rows), padded vocabulary] float32, free to be changed."""
        x = self._x[: len(rows)]
        first, last = rows[0], rows[-1]
        if list(rows) == list(range(first, last + 1)):
            source = logits[first : last + 1]
        else:
            source = logits[uploaded_ids(rows, logits.device)]
        x[:, : self._vocab_size].copy_(source)
        x[:, self._vocab_size :].fill_(-torch.inf)
        return x

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        """Room for a result of the shape of `x`, which `load` returned."""
        return self._y[: len(x)]
