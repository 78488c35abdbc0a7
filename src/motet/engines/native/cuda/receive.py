"""The process that receives a trainer's tensors over NCCL: `python -m motet.engines.native.cuda.receive`, started by
`engines.native.receiver` and by nobody else.

    standard input     orders, a line of JSON each: Join once, then Receive for each part of an update
    standard output    an answer to each

    broadcast ──► buffer on the device ──► main memory ──► the server's file in memory

The file has the tensors in the order in which they come, one behind the other, so what a broadcast brings is written as
it is. In the packed form a broadcast has as many whole tensors as make more than `buffer_bytes`. While one is written,
the next ones come, `num_buffers` at a time.

The process ends when its standard input does. If the trainer goes away while something is awaited of it, it says so and
ends: NCCL itself might wait for ever.
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
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports it

from motet.engines.native.cuda.nccl import ID_KEY, Communicator, Nccl, NcclError, connect_store, first_line, join
from motet.models.checkpoint import ITEM_BYTES, TensorFacts, write_all
from motet.models.trainer_group import JoinGroup, ReceiverAnswer, ReceiverOrder, ReceiveTensors, TrainerGroup

LOOK_S = 0.5
"""Seconds between two looks at the trainer."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Piece(NamedTuple):
    """What one broadcast brings."""

    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def pieces_of(tensors: Sequence[TensorFacts], group: TrainerGroup) -> Iterator[Piece]:
    """Yields the broadcasts in which these tensors come."""
    if not group.packed:
        yield from (Piece(tensor.num_bytes // ITEM_BYTES[tensor.dtype], DTYPES[tensor.dtype]) for tensor in tensors)
        return
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.num_bytes
        if num_bytes > group.buffer_bytes:
            yield Piece(num_bytes, torch.uint8)
            num_bytes = 0
    if num_bytes:
        yield Piece(num_bytes, torch.uint8)


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
        self._streams = [_stream(self._device) for _ in range(order.group.num_buffers)]
        nccl = Nccl(order.library)
        store = connect_store(order.group, timeout_s=order.timeout_s)
        self._watch = TrainerWatch(store, answers)
        with self._watch.on():
            self._communicator = join(order.group, store, nccl=nccl, device=self._device)
        self._watch.communicator = self._communicator

    def receive(self, order: ReceiveTensors) -> None:
        """Returns when all tensors are in the file. Raises NcclError, RuntimeError if the GPU is full, or OSError."""
        on_gpu = self._device.type == "cuda"
        pieces = [*pieces_of(order.tensors, self._group)]
        landing = torch.empty(max(piece.num_bytes for piece in pieces), dtype=torch.uint8, pin_memory=on_gpu)
        coming: deque[tuple[torch.Tensor, torch.cuda.Stream | None]] = deque()
        at = order.at
        descriptor = os.open(order.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with self._watch.on():
                for number, piece in enumerate(pieces):
                    if len(coming) == len(self._streams):
                        at = _land(*coming.popleft(), landing=landing, descriptor=descriptor, at=at)
                    coming.append(self._begin(piece, self._streams[number % len(self._streams)]))
                while coming:
                    at = _land(*coming.popleft(), landing=landing, descriptor=descriptor, at=at)
        finally:
            os.close(descriptor)
        if on_gpu:
            torch.cuda.empty_cache()  # the engines may want the memory until the next update

    def _begin(self, piece: Piece, stream: torch.cuda.Stream | None) -> tuple[torch.Tensor, torch.cuda.Stream | None]:
        with torch.cuda.stream(stream):  # does nothing for None
            buffer = torch.empty(piece.num_elements, dtype=piece.dtype, device=self._device)
            self._communicator.broadcast(buffer, stream)
        return buffer, stream


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _land(
    buffer: torch.Tensor, stream: torch.cuda.Stream | None, *, landing: torch.Tensor, descriptor: int, at: int
) -> int:
    """Waits for a broadcast, and writes what it brought at this place of the file. Returns the place after it."""
    there = landing[: buffer.nbytes]
    with torch.cuda.stream(stream):
        there.copy_(buffer.view(torch.uint8))
    return write_all(descriptor, there.numpy().data, at=at)


class TrainerWatch:
    """Ends this process if the trainer goes away while something is awaited of it."""

    def __init__(self, store: TCPStore | None, answers: BinaryIO) -> None:
        self.communicator: Communicator | None = None
        """None until the ranks have met."""
        self._store = store
        self._answers = answers

    @contextmanager
    def on(self) -> Iterator[None]:
        """Looks at the trainer's store and at NCCL inside `with`. A trainer keeps its store as long as the group."""
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(LOOK_S):
            try:
                if self._store is not None:
                    self._store.check([ID_KEY])
                if self.communicator is not None:
                    self.communicator.check()
            except (RuntimeError, NcclError) as error:
                if not over.is_set():
                    answer(self._answers, ReceiverAnswer(f"the trainer has gone: {first_line(error)}"))
                    os._exit(1)  # the main thread waits in NCCL


def answer(answers: BinaryIO, said: ReceiverAnswer) -> None:
    answers.write(msgspec.json.encode(said) + b"\n")


def main() -> int:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # NCCL logs there
    orders: queue.SimpleQueue[ReceiverOrder] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    member: TrainerRank | None = None
    while True:
        order = orders.get()
        try:
            if isinstance(order, JoinGroup):
                member = TrainerRank(order, answers)
            elif member is not None:
                member.receive(order)
        except (NcclError, RuntimeError, OSError) as error:  # torch's errors of a full GPU are RuntimeErrors
            answer(answers, ReceiverAnswer(str(error)[:1000]))
        else:
            answer(answers, ReceiverAnswer())


def _read(orders: "queue.SimpleQueue[ReceiverOrder]") -> None:
    for line in sys.stdin.buffer:
        orders.put(msgspec.json.decode(line, type=ReceiverOrder))
    os._exit(0)  # the server has ended, or needs this process no more; the main thread may wait in NCCL


if __name__ == "__main__":
    sys.exit(main())
