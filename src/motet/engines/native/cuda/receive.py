"""The process that receives a trainer's tensors over NCCL: `python -m motet.engines.native.cuda.receive`, started by
`control.nccl_receiver` with the messages of `models.trainer_group`.

    broadcast ──► buffer on the device ──► main memory ──► the server's file in memory

The file has the tensors in the order in which they come, one after the other, so the bytes of a broadcast are written
unchanged. In the packed form a broadcast has complete tensors, and ends with the tensor that makes it larger than
`buffer_bytes`. While one broadcast is written, the next `num_buffers` are received.

The process ends when its standard input ends. If the trainer goes away while this process waits for it, the process
reports that and ends: NCCL itself might wait forever.
"""

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it as exported

from motet.engines.native.cuda.nccl import ID_KEY, Communicator, Nccl, NcclError, connect_store, first_line, join
from motet.engines.native.model_weights import SAVED_DTYPES
from motet.models.checkpoint import TensorFacts
from motet.models.memory_file import write_all
from motet.models.safetensors_header import ITEM_BYTES
from motet.models.trainer_group import JoinGroup, ReceiverAnswer, ReceiverOrder, ReceiveTensors, TrainerGroup

CHECK_S = 0.5
"""Time in seconds between two checks of the trainer."""


class Broadcast(NamedTuple):
    """The content of one broadcast."""

    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def broadcasts_of(tensors: Sequence[TensorFacts], group: TrainerGroup) -> Iterator[Broadcast]:
    """Yields the broadcasts that bring these tensors, in order."""
    if not group.packed:
        yield from (
            Broadcast(tensor.num_bytes // ITEM_BYTES[tensor.dtype], SAVED_DTYPES[tensor.dtype]) for tensor in tensors
        )
        return
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.num_bytes
        if num_bytes > group.buffer_bytes:
            yield Broadcast(num_bytes, torch.uint8)
            num_bytes = 0
    if num_bytes:
        yield Broadcast(num_bytes, torch.uint8)


class TrainerRank:
    """This process as a rank of the trainer's group."""

    def __init__(self, order: JoinGroup, answers: BinaryIO) -> None:
        """Returns when all ranks have met. Raises NcclError."""
        self._group = order.group
        self._device = torch.device(order.device)
        if self._device.type == "cuda":
            if not torch.cuda.is_available():
                raise NcclError("this server sees no CUDA device")
            self._device = torch.device("cuda", self._device.index or 0)
            torch.cuda.set_device(self._device)
        self._streams = [
            torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
            for _ in range(order.group.num_buffers)
        ]
        nccl = Nccl(order.library)
        store = connect_store(order.group, timeout_s=order.timeout_s)
        self._watch = TrainerWatch(store, answers)
        with self._watch.on():
            self._communicator = join(order.group, store, nccl=nccl, device=self._device)
        self._watch.communicator = self._communicator

    def receive(self, order: ReceiveTensors) -> None:
        """Returns when all tensors are in the file. Raises NcclError, RuntimeError if the GPU is full, or OSError."""
        on_gpu = self._device.type == "cuda"
        broadcasts = [*broadcasts_of(order.tensors, self._group)]
        landing = torch.empty(max(one.num_bytes for one in broadcasts), dtype=torch.uint8, pin_memory=on_gpu)
        pending: deque[tuple[Tensor, torch.cuda.Stream | None]] = deque()
        at = order.at
        descriptor = os.open(order.path, os.O_WRONLY)
        try:
            with self._watch.on():
                for number, broadcast in enumerate(broadcasts):
                    if len(pending) == len(self._streams):
                        at = _land(*pending.popleft(), landing=landing, descriptor=descriptor, at=at)
                    pending.append(self._start(broadcast, self._streams[number % len(self._streams)]))
                while pending:
                    at = _land(*pending.popleft(), landing=landing, descriptor=descriptor, at=at)
        finally:
            os.close(descriptor)
        if on_gpu:
            torch.cuda.empty_cache()  # the engines can use the memory until the next update

    def _start(self, broadcast: Broadcast, stream: torch.cuda.Stream | None) -> tuple[Tensor, torch.cuda.Stream | None]:
        with torch.cuda.stream(stream):  # does nothing for None
            buffer = torch.empty(broadcast.num_elements, dtype=broadcast.dtype, device=self._device)
            self._communicator.broadcast(buffer, stream)
        return buffer, stream


def _land(buffer: Tensor, stream: torch.cuda.Stream | None, *, landing: Tensor, descriptor: int, at: int) -> int:
    """Waits for a broadcast, and writes its content to the file from offset `at` on. Returns the offset after it."""
    there = landing[: buffer.nbytes]
    with torch.cuda.stream(stream):
        there.copy_(buffer.view(torch.uint8))
    return write_all(descriptor, there.numpy().data, at=at)


class TrainerWatch:
    """Ends this process if the trainer goes away while the process waits for it."""

    def __init__(self, store: TCPStore | None, answers: BinaryIO) -> None:
        self.communicator: Communicator | None = None
        """The group; None until the ranks have met."""
        self._store = store
        self._answers = answers

    @contextmanager
    def on(self) -> Iterator[None]:
        """Checks the trainer's store and NCCL inside `with`. A trainer keeps its store as long as the group."""
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(CHECK_S):
            try:
                if self._store is not None:
                    self._store.check([ID_KEY])
                if self.communicator is not None:
                    self.communicator.check()
            except (RuntimeError, NcclError) as error:
                if not over.is_set():
                    send(self._answers, ReceiverAnswer(f"the trainer has gone: {first_line(error)}"))
                    os._exit(1)  # the main thread waits in NCCL


def send(answers: BinaryIO, answer: ReceiverAnswer) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")


def main() -> int:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # NCCL logs there
    orders: queue.SimpleQueue[ReceiverOrder] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    rank: TrainerRank | None = None
    while True:
        order = orders.get()
        try:
            if isinstance(order, JoinGroup):
                rank = TrainerRank(order, answers)
            elif rank is not None:
                rank.receive(order)
        except (NcclError, RuntimeError, OSError) as error:  # torch raises RuntimeError if the GPU is full
            send(answers, ReceiverAnswer(str(error)[:1000]))
        else:
            send(answers, ReceiverAnswer())


def _read(orders: "queue.SimpleQueue[ReceiverOrder]") -> None:
    for line in sys.stdin.buffer:
        orders.put(msgspec.json.decode(line, type=ReceiverOrder))
    os._exit(0)  # the server does not need this process any more; the main thread may wait in NCCL


if __name__ == "__main__":
    sys.exit(main())
