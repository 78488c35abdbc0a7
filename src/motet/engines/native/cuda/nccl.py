"""A trainer's NCCL group, which this process joins as one of its ranks. The trainer is rank 0.

    1. the trainer opens a store (torch's TCPStore) at its address; all ranks connect to it
    2. rank 0 puts the group's id there: 128 bytes, in a pickle of vLLM's `ncclUniqueId`
    3. each rank calls ncclCommInitRank with the id, and all ranks add up one float, which connects them
    4. rank 0 broadcasts; the server knows the order and sizes from the trainer's HTTP requests

A trainer without a store sends the id over HTTP, in place of 1 and 2. This is the rendezvous of vLLM's trainers
(`StatelessProcessGroup`, `PyNcclCommunicator`).

NCCL is called through ctypes because torch.distributed cannot join a group by its id: `ProcessGroupNCCL` takes a store
instead, and reads the id from a numbered key of it that torch may change. Builds of torch without CUDA, with which the
tests run a library in NCCL's place, do not have `ProcessGroupNCCL` at all.
"""

import ctypes
import pickletools
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it as exported

from motet.models.trainer_group import TrainerGroup

ID_BYTES = 128
ID_KEY = "broadcast_from/0/0"
"""The key under which the trainer stores the id: the first object that rank 0 sends to all ranks."""
ID_CLASS = "ncclUniqueId"
SUCCESS, IN_PROGRESS = 0, 7
SUM = 0
DATA_TYPES = {torch.uint8: 1, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""Numbers of NCCL's data types. All numbers here are from nccl.h."""

Buffer = ctypes.c_void_p
Handle = ctypes.c_void_p
"""Address of a communicator or a CUDA stream."""


class NcclError(Exception):
    """NCCL or the rendezvous has failed. The message has the reason."""


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


SIGNATURES: dict[str, list[object]] = {
    "ncclCommInitRank": [ctypes.POINTER(Handle), ctypes.c_int, UniqueId, ctypes.c_int],
    "ncclAllReduce": [Buffer, Buffer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, Handle, Handle],
    "ncclBroadcast": [Buffer, Buffer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, Handle, Handle],
    "ncclCommGetAsyncError": [Handle, ctypes.POINTER(ctypes.c_int)],
}


class Nccl:
    """The NCCL library. Raises NcclError if it is not there."""

    def __init__(self, path: str) -> None:
        """`path`: file of the library, or the name under which the system or torch has loaded it."""
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
            self._library.ncclGetErrorString.argtypes = [ctypes.c_int]
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as exc:
            raise NcclError(f"NCCL cannot be used: {exc}") from exc

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function. Raises NcclError, with NCCL's message, if it fails."""
        self.check(name, getattr(self._library, name)(*arguments))

    def check(self, name: str, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            why = self._library.ncclGetErrorString(result) or b""
            raise NcclError(f"{name} failed: {why.decode(errors='replace')}")


class Communicator:
    """A rank of a group, on the CUDA device that is current when the rank is made. It ends with its process."""

    def __init__(self, nccl: Nccl, unique_id: bytes, *, rank: int, world_size: int) -> None:
        """Returns when all ranks have joined. Raises NcclError."""
        self._nccl = nccl
        self._handle = Handle()
        identity = UniqueId.from_buffer_copy(unique_id)
        nccl.call("ncclCommInitRank", ctypes.byref(self._handle), world_size, identity, rank)

    def broadcast(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Receives a contiguous tensor from rank 0. On a GPU it is complete when the stream has reached this point."""
        kind, place = DATA_TYPES[tensor.dtype], Buffer(tensor.data_ptr())
        self._nccl.call("ncclBroadcast", None, place, tensor.numel(), kind, 0, self._handle, _handle(stream))

    def add_up(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Replaces each element of a contiguous tensor by its sum over all ranks."""
        kind, place = DATA_TYPES[tensor.dtype], Buffer(tensor.data_ptr())
        self._nccl.call("ncclAllReduce", place, place, tensor.numel(), kind, SUM, self._handle, _handle(stream))

    def check(self) -> None:
        """Raises NcclError if something failed outside the calls, such as a connection. Any thread can call it."""
        result = ctypes.c_int()
        self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(result))
        self._nccl.check("a broadcast", result.value)


def _handle(stream: torch.cuda.Stream | None) -> Handle:
    return Handle(None if stream is None else stream.cuda_stream)


def connect_store(group: TrainerGroup, *, timeout_s: float) -> TCPStore | None:
    """Returns a connection to the trainer's store; None if it has none. Raises NcclError if it cannot be reached."""
    if group.unique_id:
        return None
    limit = timedelta(seconds=timeout_s)
    try:
        return TCPStore(group.master_address, group.master_port, group.world_size, is_master=False, timeout=limit)
    except RuntimeError as exc:
        where = f"{group.master_address}:{group.master_port}"
        raise NcclError(f"there is no store of a trainer at {where}: {first_line(exc)}") from exc


def join(group: TrainerGroup, store: TCPStore | None, *, nccl: Nccl, device: torch.device) -> Communicator:
    """Returns when all ranks have met and are connected. Raises NcclError."""
    unique_id = group.unique_id
    if store is not None:
        try:
            unique_id = id_in(store.get(ID_KEY))
        except RuntimeError as exc:
            raise NcclError(f"the trainer has put no id into its store: {first_line(exc)}") from exc
    communicator = Communicator(nccl, unique_id, rank=group.rank, world_size=group.world_size)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    first = torch.zeros(1, device=device)
    communicator.add_up(first, stream)
    if stream is not None:
        stream.synchronize()
    return communicator


def id_in(pickled: bytes) -> bytes:
    """Returns the bytes of a group's id: the only bytes in the pickle of a `ncclUniqueId` of any module. The pickle is
    scanned and not loaded, so that nothing that it names is run. Raises NcclError for another pickle."""
    try:
        constants = [argument for _, argument, _ in pickletools.genops(pickled)]
    except Exception as exc:  # a pickle can be wrong in any way
        raise NcclError(f"the trainer's store does not have the id of a group: {exc}") from exc
    found = [constant for constant in constants if isinstance(constant, bytes)]
    if ID_CLASS not in constants or [*map(len, found)] != [ID_BYTES]:
        raise NcclError("the trainer's store does not have the id of a group")
    return found[0]


def first_line(error: Exception) -> str:
    """Returns the message of an error. In torch's errors, further lines have the place where it was raised."""
    return str(error).partition("\n")[0]
