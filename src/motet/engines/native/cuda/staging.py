"""Between host and device without waiting: pinned memory, which the device copies from and to by itself.

A copy from ordinary memory makes the host wait until all that was launched before it is done. From pinned memory it
does not, so the memory must be left alone until the copy is over.
"""

import torch

from motet.engines.native.cuda.work import Ints


class Staging:
    """A step's integers on their way to the device, and its one flag on the way back. On the CPU, which has no pinned
    memory, copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._ints = torch.zeros(0, dtype=torch.int32)
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=self._pinned)
        self._sent = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        self._fetched = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]

    def room(self, count: int) -> Ints:
        """Memory for `count` integers, to be written before `send`; what was sent before is on the device by now."""
        if self._sent is not None:
            self._sent.synchronize()
        if count > len(self._ints):
            self._ints = torch.zeros(2 * count, dtype=torch.int32, pin_memory=self._pinned)
        return self._ints.numpy()

    def send(self, count: int, memory: torch.Tensor) -> None:
        """The first `count` integers, to the beginning of `memory`."""
        memory[:count].copy_(self._ints[:count], non_blocking=self._pinned)
        if self._sent is not None:
            self._sent.record()

    def fetch_flag(self, flags: torch.Tensor) -> None:
        """Sends for the greatest of `flags` [n] int32."""
        self._flag.copy_(flags.amax(0, keepdim=True), non_blocking=self._pinned)
        if self._fetched is not None:
            self._fetched.record()

    def flag(self) -> bool:
        """Whether the flag that was sent for is set."""
        if self._fetched is not None:
            self._fetched.synchronize()
        return bool(self._flag[0])
