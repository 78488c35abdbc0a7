"""NIXL over UCX: moves blocks between processes and machines, by RDMA, shared memory or TCP, as both sides can.

    read_blocks      initialize_xfer, transfer: over shared memory this is the copy, 30 MB in 4 ms
    NixlRead.poll    check_xfer_state, which also moves this side on
    poll             get_new_notifs: answers what peers read here over TCP, and collects their messages

There is no progress thread, because NIXL's uses a whole core for each agent, even when idle; so a read over TCP goes on
only while its target polls too. There is no listening thread either: descriptions travel over the side channel.

A read that is not final may write at any time, even hours later if its peer was stopped, and even after it was
cancelled, released or removed (NIXL returns at once from all of these, and the bytes still land). So a handle is
released only when its read is final, or with the whole agent, whose connections end with it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import nixl  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import numpy.typing as npt

from motet.errors import StartupError
from motet.transfer.orders import FailureKind, TransferError
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

LOOPBACK = {"NET_DEVICES": "lo"}
"""UCX settings of a worker that no other machine should reach; without them UCX listens on every network."""

CLOSE_PATIENCE_S = 0.5
"""Seconds for which `close` waits for reads under way. Over TCP, UCX aborts the process that is read from ("unexpected
error: Endpoint timeout") if it answers a reader that has gone; so a reader waits for the answer if it can. A reader
that is killed cannot: a worker that polls every millisecond has usually answered before, one that was stopped
aborts."""

NIXL_ERRORS: tuple[type[Exception], ...] = (
    *(kind for kind in vars(nixl).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    *(OverflowError, RuntimeError, TypeError, ValueError),  # its bindings raise these for values that do not fit
)

SEND_ERRORS: tuple[type[Exception], ...] = (TransferError, *NIXL_ERRORS)

log = logging.getLogger(__name__)


@dataclass
class RemoteAgent:
    """A worker that can be read from."""

    name: str
    memory: RegisteredMemory
    running: int = 0
    """Number of reads that are not final."""
    broken: bool = False
    """True if its connection has failed; it does not come back by itself."""
    leaving: bool = False
    """True if the agent must remove it once none of its reads runs."""


class NixlRead:
    """A read of blocks, or of entries of a proof into a buffer of its own."""

    def __init__(
        self,
        agent: nixl.nixl_agent,
        peer: RemoteAgent,
        *,
        landed: Callable[[], object] = lambda: None,
        buffer: nixl.nixlRegDList | None = None,
    ) -> None:
        """`landed` is called once when all is here. `buffer`: registered memory that only this read uses."""
        self.num_bytes = 0
        self.num_descriptors = 0
        self.closed = False
        self._agent = agent
        self._peer = peer
        self._landed = landed
        self._buffer = buffer
        self._handle: nixl.nixl_xfer_handle | None = None
        self._state = ReadState.RUNNING

    def post(self, ours: tuple[Spans, int], theirs: tuple[Spans, int]) -> None:
        """Posts the read, given spans and their device on both sides. If NIXL raises, the caller must `cut` it."""
        self._peer.running += 1
        self.num_bytes, self.num_descriptors = int(ours[0][:, 1].sum()), len(ours[0])
        local, remote = (self._agent.get_xfer_descs(*as_table(*side)) for side in (ours, theirs))
        self._handle = self._agent.initialize_xfer("READ", local, remote, self._peer.name)
        self._note(self._agent.transfer(self._handle))

    def poll(self) -> ReadState:
        if self._state is ReadState.RUNNING:
            try:
                self._note(self._agent.check_xfer_state(self._handle))
            except NIXL_ERRORS as error:
                log.debug("read from %s failed: %r", self._peer.name, error)
                self._note("ERR")
        return self._state

    def close(self) -> None:
        if self._state is ReadState.RUNNING:
            raise RuntimeError("a read that still runs may still write: it cannot be closed")
        self._let_go()

    def cut(self) -> None:
        """Ends a read that was never posted, or whose agent is closing, which ends everything that could write."""
        if self._state is ReadState.RUNNING:
            self._note("ERR")
        self._let_go()

    def _note(self, status: str) -> None:
        """`status`: PROC, DONE or ERR, NIXL's words."""
        if status == "PROC":
            return
        self._peer.running -= 1
        self._state = ReadState.DONE if status == "DONE" else ReadState.FAILED
        if self._state is ReadState.FAILED:
            self._peer.broken = True
        else:
            self._landed()

    def _let_go(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            if self._handle is not None:
                self._agent.release_xfer_handle(self._handle)
            if self._buffer is not None:
                self._agent.deregister_memory(self._buffer)
        except NIXL_ERRORS as error:
            log.debug("read from %s was not released: %r", self._peer.name, error)
        self._handle = self._agent = None


class NixlTransport:
    """One NIXL agent with the KV memory and the proof of one worker."""

    def __init__(self, name: str, memory: RegisteredMemory, *, ucx: Mapping[str, str] | None = None) -> None:
        """`name` must be new at every start. `ucx`: settings of UCX, such as `{"TLS": "tcp"}`. Raises StartupError."""
        _silence_console()
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
        self._blocks: nixl.nixlRegDList | None = None
        self._description = b""
        self.offer()

    def describe(self) -> bytes:
        return self._description

    def connect(self, description: bytes, memory: RegisteredMemory) -> str:
        check_shapes(ours=self._memory, theirs=memory)
        name = self._add(description)
        if (known := self._peers.get(name)) is not None and known.broken:  # it is made again
            self._sweep()
            if known.running:
                raise TransferError(f"reads over the lost connection to {name} still run", FailureKind.PEER_LOST)
            self._forget(known)
            self._add(description)
        peer = self._peers.setdefault(name, RemoteAgent(name, memory))
        peer.memory, peer.leaving = memory, False
        return name

    def disconnect(self, peer: str) -> None:
        if known := self._peers.get(peer):
            known.leaving = True
            self._sweep()

    def read_blocks(self, peer: str, runs: list[BlockRun]) -> NixlRead:
        known = self._known(peer)
        theirs = block_spans(known.memory, [(run.remote, run.count) for run in runs])
        ours = block_spans(self._memory, [(run.local, run.count) for run in runs])
        read = NixlRead(self._open(), known)
        return self._post(read, (ours, self._memory.device), theirs=(theirs, known.memory.device))

    def read_proof(self, peer: str, entries: list[int]) -> tuple[NixlRead, list[int]]:
        known = self._known(peer)
        wanted = np.unique(np.array(entries, np.int64))  # each entry once, in ascending order
        places = np.searchsorted(wanted, entries)
        runs = merged((entry, rank) for rank, entry in enumerate(wanted.tolist()))
        theirs = proof_spans(known.memory, [(run.remote, run.count) for run in runs])
        values, shown = np.zeros(len(wanted), np.int64), list[int]()
        address = values.ctypes.data
        try:
            buffer = register(self._open(), entry_spans(address, [(0, len(wanted))]), device=-1)
        except NIXL_ERRORS as error:
            raise TransferError(f"no memory can be registered: {error!r}", FailureKind.PEER_LOST) from error
        ours = entry_spans(address, [(run.local, run.count) for run in runs])
        read = NixlRead(self._open(), known, landed=lambda: shown.extend(values[places].tolist()), buffer=buffer)
        return self._post(read, (ours, -1), theirs=(theirs, -1)), shown

    def notify(self, peer: str, message: bytes) -> None:
        try:
            self._open().send_notif(self._known(peer).name, message)
        except SEND_ERRORS as error:
            log.debug("message to %s was not sent: %r", peer, error)

    def poll(self) -> list[bytes]:
        try:
            messages = self._open().get_new_notifs()
        except NIXL_ERRORS as error:
            log.warning("NIXL cannot look for messages: %r", error)
            messages = {}
        self._sweep()
        return [message for of_one in messages.values() for message in of_one]

    def withdraw(self) -> bool:
        self._sweep()
        if any(peer.running for peer in self._peers.values()):
            return False
        if self._blocks is not None:
            self._open().deregister_memory(self._blocks)
            self._blocks = None
        return True

    def offer(self) -> None:
        if self._blocks is not None:
            return
        memory, agent = self._memory, self._open()
        try:
            self._blocks = register(agent, block_spans(memory, [(0, memory.num_blocks)]), device=memory.device)
            self._description = agent.get_agent_metadata()
        except NIXL_ERRORS as error:
            raise StartupError(f"NIXL cannot register the KV cache: {error!r}") from error

    def close(self) -> None:
        if self._agent is None:
            return
        end_s = time.monotonic() + CLOSE_PATIENCE_S
        while any(peer.running for peer in self._peers.values()) and time.monotonic() < end_s:
            self.poll()
            time.sleep(0.001)
        for read in self._reads:
            read.cut()
        for peer in list(self._peers.values()):
            self._forget(peer)
        for registered in (self._blocks, self._proof):
            if registered is not None:
                self._agent.deregister_memory(registered)
        self._agent = None  # the last reference: NIXL ends its connections

    def _open(self) -> nixl.nixl_agent:
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
            name: str = self._open().add_remote_agent(description).decode()
        except nixl.nixlNotAllowedError as error:
            raise TransferError("another start of a worker has this name", FailureKind.RESTARTED) from error
        except NIXL_ERRORS as error:
            raise TransferError(f"NIXL refuses the worker's description: {error!r}", FailureKind.REFUSED) from error
        return name

    def _post(self, read: NixlRead, ours: tuple[Spans, int], *, theirs: tuple[Spans, int]) -> NixlRead:
        try:
            read.post(ours, theirs)
        except NIXL_ERRORS as error:
            read.cut()
            raise TransferError(f"a read cannot be posted: {error!r}", FailureKind.PEER_LOST) from error
        self._reads.append(read)
        return read

    def _sweep(self) -> None:
        """Drives the reads; then removes closed ones, and leaving peers that have none any more."""
        for read in self._reads:
            read.poll()
        self._reads = [read for read in self._reads if not read.closed]
        for peer in [peer for peer in self._peers.values() if peer.leaving and not peer.running]:
            self._forget(peer)

    def _forget(self, peer: RemoteAgent) -> None:
        self._peers.pop(peer.name, None)
        try:
            self._open().remove_remote_agent(peer.name)
        except NIXL_ERRORS as error:
            log.debug("%s was not removed: %r", peer.name, error)


def register(agent: nixl.nixl_agent, spans: Spans, *, device: int) -> nixl.nixlRegDList:
    """Makes memory known to the agent; returns what `deregister_memory` takes."""
    return agent.register_memory(*as_table(spans, device))


def as_table(spans: Spans, device: int) -> tuple[npt.NDArray[np.uint64], str]:
    """Returns spans as NIXL takes them: [num_spans, 3] of address, length and device, and the type of memory."""
    devices = np.full((len(spans), 1), max(device, 0), np.uint64)
    return np.concatenate([spans, devices], axis=1), "DRAM" if device < 0 else "VRAM"


def _silence_console() -> None:
    """Sends NIXL's warnings to the root logger: by default it prints INFO lines on standard output."""
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(logging.WARNING)
