"""Finds, on the CPU, operations that would make the host wait for a GPU because it needs their result to continue.

Copies from pageable memory wait too, but are not found here: `tests/gpu` counts all waits on the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701  documented, but there is no other name for it

_NEED_VALUES = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.equal.default",
    "aten.is_nonzero.default",
    "aten._unique2.default",
    "aten.repeat_interleave.Tensor",
}
_INDEX = {"aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default"}


class Waits(TorchDispatchMode):
    """Records these operations while the context is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        by_mask = name in _INDEX and any(i is not None and i.dtype is torch.bool for i in args[1])
        if name in _NEED_VALUES or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
