"""NIXL over UCX: moves blocks between processes and machines by RDMA, shared memory or TCP, as both sides support.

    1  read_blocks      initialize_xfer, transfer: over shared memory, this call makes the copy, 30 MB in 4 ms
    2  NixlRead.poll    check_xfer_state, which also advances the read on this side
    3  poll             get_new_notifs: serves reads of peers over TCP, and returns the messages of peers
    4  NixlRead.close   release_xfer_handle

NIXL's progress thread is not used, because it occupies a complete core for each agent, even when idle. A read over TCP
therefore advances only while its target polls too. NIXL's listening thread is not used either: descriptions travel over
the side channel.

Bytes of a read that is not final can arrive at any time: hours later if its peer was stopped, and even after the read
was cancelled, released or removed, since NIXL returns from these calls at once. A handle is therefore released only
when its read is final, or together with the agent, whose connections end with it.

Motet requires the package `nixl-cu13`: NIXL's build for CUDA 13, which also runs without CUDA. The package `nixl`,
where it is installed, takes precedence. It contains a second build for CUDA 12, and selects the build for the torch.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from motet.errors import StartupError
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.ticket import TransportKind
from motet.transfer.transport import (
    BlockRun,
    ReadState,
    RegisteredMemory,
    Spans,
    block_spans,
    check_shapes,
    entry_spans,
    merged,
    proof_spans,
)

try:
    import nixl
except ImportError:
    import nixl_cu13 as nixl

bindings = nixl._bindings  # noqa: SLF001  # the package `nixl_cu13` has no public name for NIXL's errors

LOOPBACK = {"NET_DEVICES": "lo"}
"""UCX settings of a worker that no other machine should reach. Without them UCX listens on every network."""

CLOSE_TIMEOUT_S = 0.5
"""Time in seconds for which `close` waits for running reads. Over TCP, UCX aborts a process that answers a reader that
is gone ("unexpected error: Endpoint timeout"), so a reader waits for the answer if it can. A reader that is killed
cannot wait: a worker that polls every millisecond has usually answered before, but a stopped worker aborts."""
NIXL_ERRORS: tuple[type[Exception], ...] = (
    *(kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    *(OverflowError, RuntimeError, TypeError, ValueError),  # raised by the bindings for values out of range
)
SEND_ERRORS: tuple[type[Exception], ...] = (TransferError, *NIXL_ERRORS)

log = logging.getLogger(__name__)


@dataclass
class RemoteAgent:
    """A worker from which this one reads."""

    name: str
    memory: RegisteredMemory
    num_running: int = 0
    """Number of reads that are not final."""
    broken: bool = False
    """True if the connection has failed. It does not recover by itself."""
    leaving: bool = False
    """True if the agent must remove the worker once all reads from it are final."""


class NixlRead:
    """A read of blocks, or of entries of a proof into a separate buffer."""

    def __init__(
        self,
        agent: nixl.nixl_agent,
        peer: RemoteAgent,
        *,
        on_done: Callable[[], object] = lambda: None,
        buffer: object | None = None,
    ) -> None:
        """`on_done`: called once, when all bytes have arrived. `buffer`: registered memory that only this read uses."""
        self.num_bytes = 0
        self.num_descriptors = 0
        self.closed = False
        self._agent = agent
        self._peer = peer
        self._on_done = on_done
        self._buffer = buffer
        self._handle: nixl.nixl_xfer_handle | None = None
        self._state = ReadState.RUNNING

    def post(self, local: tuple[Spans, int], remote: tuple[Spans, int]) -> None:
        """Posts the read of spans, each side with its device. If NIXL raises an error, the caller calls `abort`."""
        self._peer.num_running += 1
        self.num_bytes, self.num_descriptors = int(local[0][:, 1].sum()), len(local[0])
        to, source = (self._agent.get_xfer_descs(*as_table(*side)) for side in (local, remote))
        self._handle = self._agent.initialize_xfer("READ", to, source, self._peer.name)
        self._set_status(self._agent.transfer(self._handle))

    def poll(self) -> ReadState:
        if self._state is ReadState.RUNNING:
            try:
                self._set_status(self._agent.check_xfer_state(self._handle))
            except NIXL_ERRORS as error:
                log.debug("read from %s failed: %r", self._peer.name, error)
                self._set_status("ERR")
        return self._state

    def close(self) -> None:
        if self._state is ReadState.RUNNING:
            raise RuntimeError("a running read cannot be closed: its bytes can still arrive")
        self._free()

    def abort(self) -> None:
        """Ends a read that was never posted, or whose agent is closing, so that no bytes can arrive any more."""
        if self._state is ReadState.RUNNING:
            self._set_status("ERR")
        self._free()

    def _set_status(self, status: str) -> None:
        """Applies a status of NIXL: PROC, DONE or ERR."""
        if status == "PROC":
            return
        self._peer.num_running -= 1
        if status == "DONE":
            self._state = ReadState.DONE
            self._on_done()
        else:
            self._state, self._peer.broken = ReadState.FAILED, True

    def _free(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            if self._handle is not None:
                self._agent.release_xfer_handle(self._handle)
            if self._buffer is not None:
                self._agent.deregister_memory(self._buffer)
        except NIXL_ERRORS as error:
            log.debug("cannot release a read from %s: %r", self._peer.name, error)
        self._handle = self._agent = None


class NixlTransport:
    """One NIXL agent with the KV memory and the proof of one worker."""

    kind = TransportKind.NIXL

    def __init__(self, name: str, memory: RegisteredMemory, *, ucx: Mapping[str, str] | None = None) -> None:
        """`name`: new each time a worker starts. `ucx`: settings such as `{"TLS": "tcp"}`. Raises StartupError."""
        _redirect_nixl_log()
        config = nixl.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=[])
        settings = {"engine_config": ",".join(f"{key}={value}" for key, value in ucx.items())} if ucx else {}
        self._memory = memory
        self._peers: dict[str, RemoteAgent] = {}
        self._reads: list[NixlRead] = []
        try:
            self._agent = nixl.nixl_agent(name, config)
            self._agent.create_backend("UCX", settings)
            self._proof = register(self._agent, proof_spans(memory, [(0, memory.proof_entries)]), device=-1)
        except NIXL_ERRORS as error:
            raise StartupError(f"NIXL cannot start: {error!r}") from error
        self._blocks: object | None = None
        self._description = b""
        self.register_blocks()

    def describe(self) -> bytes:
        return self._description

    def connect(self, description: bytes, memory: RegisteredMemory) -> str:
        check_shapes(local=self._memory, remote=memory)
        name = self._add(description)
        if (known := self._peers.get(name)) is not None and known.broken:  # the agent is removed and added again
            self._remove_finished()
            if known.num_running:
                raise TransferError(f"reads over the lost connection to {name} still run", FailureKind.PEER_LOST)
            self._remove(known)
            self._add(description)
        peer = self._peers.setdefault(name, RemoteAgent(name, memory))
        peer.memory, peer.leaving = memory, False
        return name

    def disconnect(self, peer: str) -> None:
        if known := self._peers.get(peer):
            known.leaving = True
            self._remove_finished()

    def read_blocks(self, peer: str, runs: list[BlockRun]) -> NixlRead:
        known = self._known(peer)
        remote = block_spans(known.memory, [(run.remote, run.count) for run in runs])
        local = block_spans(self._memory, [(run.local, run.count) for run in runs])
        read = NixlRead(self._agent_if_open(), known)
        return self._post(read, (local, self._memory.device), remote=(remote, known.memory.device))

    def read_proof(self, peer: str, entries: list[int]) -> tuple[NixlRead, list[int]]:
        known = self._known(peer)
        unique = np.unique(np.array(entries, np.int64))  # each entry once, in ascending order
        places = np.searchsorted(unique, entries)
        runs = merged((entry, rank) for rank, entry in enumerate(unique.tolist()))
        remote = proof_spans(known.memory, [(run.remote, run.count) for run in runs])
        buffer, values = np.zeros(len(unique), np.int64), list[int]()
        address = buffer.ctypes.data
        agent = self._agent_if_open()
        try:
            registered = register(agent, entry_spans(address, [(0, len(unique))]), device=-1)
        except NIXL_ERRORS as error:
            raise TransferError(f"no memory can be registered: {error!r}", FailureKind.PEER_LOST) from error
        local = entry_spans(address, [(run.local, run.count) for run in runs])
        read = NixlRead(agent, known, on_done=lambda: values.extend(buffer[places].tolist()), buffer=registered)
        return self._post(read, (local, -1), remote=(remote, -1)), values

    def notify(self, peer: str, message: bytes) -> None:
        try:
            self._agent_if_open().send_notif(self._known(peer).name, message)
        except SEND_ERRORS as error:
            log.debug("cannot send a message to %s: %r", peer, error)

    def has_arrivals(self) -> bool:
        return False

    def poll(self) -> list[bytes]:
        try:
            messages = self._agent_if_open().get_new_notifs()
        except NIXL_ERRORS as error:
            log.warning("NIXL cannot poll for messages: %r", error)
            messages = {}
        self._remove_finished()
        return [message for of_one_peer in messages.values() for message in of_one_peer]

    def deregister_blocks(self) -> bool:
        self._remove_finished()
        if any(peer.num_running for peer in self._peers.values()):
            return False
        if self._blocks is not None:
            self._agent_if_open().deregister_memory(self._blocks)
            self._blocks = None
        return True

    def register_blocks(self) -> None:
        if self._blocks is not None:
            return
        memory, agent = self._memory, self._agent_if_open()
        try:
            self._blocks = register(agent, block_spans(memory, [(0, memory.num_blocks)]), device=memory.device)
            self._description = agent.get_agent_metadata()
        except NIXL_ERRORS as error:
            raise StartupError(f"NIXL cannot register the KV cache: {error!r}") from error

    def close(self) -> None:
        if self._agent is None:
            return
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        while any(peer.num_running for peer in self._peers.values()) and time.monotonic() < end_s:
            self.poll()
            time.sleep(0.001)
        for read in self._reads:
            read.abort()
        for peer in list(self._peers.values()):
            self._remove(peer)
        for registered in (self._blocks, self._proof):
            if registered is not None:
                self._agent.deregister_memory(registered)
        self._agent = None  # the last reference: NIXL ends its connections

    def _agent_if_open(self) -> nixl.nixl_agent:
        """Returns the agent; raises TransferError once the transport is closed."""
        if self._agent is None:
            raise TransferError("this worker's transport is closed", FailureKind.CLOSED)
        return self._agent

    def _known(self, name: str) -> RemoteAgent:
        peer = self._peers.get(name)
        if peer is None or peer.leaving or peer.broken:
            raise TransferError(f"there is no connection to {name}", FailureKind.PEER_LOST)
        return peer

    def _add(self, description: bytes) -> str:
        try:
            return str(self._agent_if_open().add_remote_agent(description).decode())
        except bindings.nixlNotAllowedError as error:
            raise TransferError("an earlier start of a worker has this name", FailureKind.RESTARTED) from error
        except NIXL_ERRORS as error:
            raise TransferError(f"NIXL refuses the worker's description: {error!r}", FailureKind.REFUSED) from error

    def _post(self, read: NixlRead, local: tuple[Spans, int], *, remote: tuple[Spans, int]) -> NixlRead:
        try:
            read.post(local, remote)
        except NIXL_ERRORS as error:
            read.abort()
            raise TransferError(f"a read cannot be posted: {error!r}", FailureKind.PEER_LOST) from error
        self._reads.append(read)
        return read

    def _remove_finished(self) -> None:
        """Advances the reads. Then removes closed reads, and leaving peers without running reads."""
        for read in self._reads:
            read.poll()
        self._reads = [read for read in self._reads if not read.closed]
        for peer in [peer for peer in self._peers.values() if peer.leaving and not peer.num_running]:
            self._remove(peer)

    def _remove(self, peer: RemoteAgent) -> None:
        self._peers.pop(peer.name, None)
        try:
            self._agent_if_open().remove_remote_agent(peer.name)
        except NIXL_ERRORS as error:
            log.debug("cannot remove %s: %r", peer.name, error)


def register(agent: nixl.nixl_agent, spans: Spans, *, device: int) -> object:
    """Returns the list that `deregister_memory` takes."""
    return agent.register_memory(*as_table(spans, device))


def as_table(spans: Spans, device: int) -> tuple[npt.NDArray[np.uint64], str]:
    """Returns spans in NIXL's form: [num_spans, 3] of address, length and device, and the type of memory."""
    devices = np.full((len(spans), 1), max(device, 0), np.uint64)
    return np.concatenate([spans, devices], axis=1), "DRAM" if device < 0 else "VRAM"


def _redirect_nixl_log() -> None:
    """Sends NIXL's warnings to the root logger, instead of INFO lines to standard output."""
    nixl_log = logging.getLogger("nixl")
    nixl_log.handlers.clear()
    nixl_log.propagate = True
    nixl_log.setLevel(logging.WARNING)
