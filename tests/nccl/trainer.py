"""A trainer that sends its weights as vLLM's trainers do, in its own process: `python -m tests.nccl.trainer`.

It reads a `Plan` from its standard input, opens a store, joins the group as rank 0, and sends each file of the plan as
one update. It prints `updated NUMBER` after each update. After `halt_at` broadcasts of the last update, it prints
`sent NUMBER` and waits until it is killed.
"""

import ctypes
import pickle  # noqa: TID251  vLLM's trainers store pickles
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
import msgspec
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it as exported

from motet.engines.native.cuda.nccl import DATA_TYPES, ID_KEY, SUM, Handle, Nccl, UniqueId
from tests.patience import PATIENCE_S

NEVER = threading.Event()


class Plan(msgspec.Struct, frozen=True):
    server: str
    library: str
    files: list[str]
    """One safetensors file per update."""
    device: str = "cpu"
    packed: bool = True
    buffer_bytes: int = 2**30
    num_buffers: int = 2
    by_id: bool = False
    """True if the id of the group is sent to the server, and there is no store."""
    halt_at: int | None = None
    """Number of broadcasts of the last update after which the trainer waits until it is killed. None to send all."""


class ncclUniqueId(UniqueId):
    """A class with the name under which vLLM's class is pickled."""


def packed(tensors: Iterable[torch.Tensor], *, buffer_bytes: int) -> Iterator[torch.Tensor]:
    """Yields the content of each broadcast: concatenated tensors, until they exceed the buffer."""
    waiting: list[torch.Tensor] = []
    for tensor in tensors:
        waiting.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(one.nbytes for one in waiting) > buffer_bytes:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


class Root:
    """Rank 0 of a group of two."""

    def __init__(self, plan: Plan) -> None:
        self._nccl = Nccl(plan.library)
        self._device = torch.device(plan.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._handle = Handle()
        self.id = ncclUniqueId()
        self._nccl.call("ncclGetUniqueId", ctypes.byref(self.id))

    def meet(self) -> None:
        self._nccl.call("ncclCommInitRank", ctypes.byref(self._handle), 2, self.id, 0)
        one = torch.zeros(1, device=self._device)
        place = ctypes.c_void_p(one.data_ptr())
        self._nccl.call("ncclAllReduce", place, place, 1, DATA_TYPES[one.dtype], SUM, self._handle, None)
        self._wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        place = ctypes.c_void_p(tensor.data_ptr())
        kind = DATA_TYPES[tensor.dtype]
        self._nccl.call("ncclBroadcast", place, place, tensor.numel(), kind, 0, self._handle, None)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def meet(plan: Plan, http: httpx.Client) -> tuple[Root, TCPStore | None]:
    root = Root(plan)
    info: dict[str, object] = {"rank_offset": 1, "world_size": 2, "packed": plan.packed}
    info |= {"packed_buffer_size_bytes": plan.buffer_bytes, "packed_num_buffers": plan.num_buffers}
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if plan.by_id:
        info["nccl_unique_id_b64"] = msgspec.json.decode(msgspec.json.encode(bytes(root.id.internal)))
    else:
        info |= {"master_address": "127.0.0.1", "master_port": port}
    store = None
    with ThreadPoolExecutor(1) as others:
        answer = others.submit(http.post, "/init_weight_transfer_engine", json={"init_info": info})
        if not plan.by_id:
            limit = timedelta(seconds=PATIENCE_S)
            descriptor = listener.detach()
            store = TCPStore(
                "127.0.0.1", port, 2, is_master=True, timeout=limit, use_libuv=False, master_listen_fd=descriptor
            )
            store.set(ID_KEY, pickle.dumps(root.id))  # type: ignore[arg-type]  # it accepts bytes too
        root.meet()
        check(answer.result())
    listener.close()
    return root, store


def update(plan: Plan, number: int, *, root: Root, http: httpx.Client) -> None:
    tensors = {name: tensor.to(plan.device) for name, tensor in load_file(plan.files[number]).items()}
    info = {
        "names": [*tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [[*tensor.shape] for tensor in tensors.values()],
    }
    check(http.post("/start_weight_update"))
    last = number == len(plan.files) - 1
    broadcasts = packed(tensors.values(), buffer_bytes=plan.buffer_bytes) if plan.packed else tensors.values()
    with ThreadPoolExecutor(1) as others:
        answer = others.submit(http.post, "/update_weights", json={"update_info": info})
        for sent, tensor in enumerate(broadcasts):
            if last and sent == plan.halt_at:
                print_line(f"sent {sent}")
                NEVER.wait()
            root.broadcast(tensor.contiguous())
        check(answer.result())
    check(http.post("/finish_weight_update", json={"weight_version": f"nccl {number}"}))


def check(response: httpx.Response) -> None:
    assert response.status_code == httpx.codes.OK, response.text


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=Plan)
    with httpx.Client(base_url=plan.server, timeout=PATIENCE_S) as http:
        root, store = meet(plan, http)
        for number in range(len(plan.files)):
            update(plan, number, root=root, http=http)
            print_line(f"updated {number}")
        sys.stdin.buffer.read()
    del store


if __name__ == "__main__":
    main()
