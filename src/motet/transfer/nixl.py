"""NIXL over UCX: blocks between processes and machines, by RDMA, shared memory or TCP, whichever both sides have.

    read_blocks   initialize_xfer, transfer: over shared memory this is the copy, 30 MB in 4 ms
    Read.poll     check_xfer_state, which also moves this side on
    poll          get_new_notifs: answers what peers read here over TCP, and collects their messages

There is no progress thread, because NIXL's burns a core per agent, idle or not; so a read over TCP gets on only while
its target polls too. There is no listening thread either: descriptions travel over the side channel.
"""

import logging
import time
from collections.abc import Mapping

import nixl  # type: ignore[import-untyped]  # it has no annotations
import numpy as np

from motet.errors import StartupError
from motet.transfer.base import FailureKind, TransferError
from motet.transfer.layout import Memory, Run, merged
from motet.transfer.nixl_read import NIXL_ERRORS, NixlRead, ProofBuffer, Remote, register
from motet.transfer.spans import Spans, block_spans, check_shapes, entry_spans, proof_spans

LOOPBACK = {"NET_DEVICES": "lo"}
"""UCX settings of a worker that no other machine should reach; without them UCX listens on every network."""

CLOSE_PATIENCE_S = 0.5
"""How long `close` waits for reads under way. UCX aborts a process that is read from over TCP ("unexpected error:
Endpoint timeout") when it comes to answer a reader that has gone since; so a reader that can wait for the answer does.
One that is killed cannot: a worker that polls every millisecond has answered by then, one that was stopped aborts."""

SEND_ERRORS: tuple[type[Exception], ...] = (TransferError, *NIXL_ERRORS)

log = logging.getLogger(__name__)


class NixlTransport:
    """One NIXL agent with the KV memory and the proof of one worker."""

    def __init__(self, name: str, memory: Memory, *, ucx: Mapping[str, str] | None = None) -> None:
        """`name` must be new at every start. `ucx`: settings of UCX without their prefix, such as `{"TLS": "tcp"}`.

        Raises StartupError."""
        _silence_console()
        config = nixl.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=[])
        settings = {"engine_config": ",".join(f"{key}={value}" for key, value in ucx.items())} if ucx else {}
        self._memory = memory
        self._peers: dict[str, Remote] = {}
        self._reads: list[NixlRead] = []
        try:
            self._agent = nixl.nixl_agent(name, config)
            self._agent.create_backend("UCX", settings)
            blocks = register(self._agent, block_spans(memory, [(0, memory.num_blocks)]), memory.device)
            proof = register(self._agent, proof_spans(memory, [(0, memory.proof_entries)]), device=-1)
            self._description: bytes = self._agent.get_agent_metadata()
        except NIXL_ERRORS as error:
            raise StartupError(f"NIXL cannot start: {error!r}") from error
        self._registered = [blocks, proof]

    def describe(self) -> bytes:
        return self._description

    def connect(self, description: bytes, memory: Memory) -> str:
        check_shapes(ours=self._memory, theirs=memory)
        name = self._add(description)
        if name in self._peers and self._peers[name].broken:
            self._renew(self._peers[name], description)
        peer = self._peers.setdefault(name, Remote(name, memory))
        peer.memory, peer.leaving = memory, False
        return name

    def disconnect(self, peer: str) -> None:
        if known := self._peers.get(peer):
            known.leaving = True
            self._sweep()

    def read_blocks(self, peer: str, runs: list[Run]) -> NixlRead:
        known = self._known(peer)
        theirs = block_spans(known.memory, [(run.remote, run.count) for run in runs])
        ours = block_spans(self._memory, [(run.local, run.count) for run in runs])
        read = NixlRead(self._open(), known)
        return self._post(read, (ours, self._memory.device), (theirs, known.memory.device))

    def read_proof(self, peer: str, entries: list[int]) -> tuple[NixlRead, list[int]]:
        known = self._known(peer)
        wanted = np.unique(np.array(entries, np.int64))
        runs = merged((entry, rank) for rank, entry in enumerate(wanted.tolist()))
        theirs = proof_spans(known.memory, [(run.remote, run.count) for run in runs])
        try:
            buffer = ProofBuffer(self._open(), len(wanted), np.searchsorted(wanted, entries))
        except NIXL_ERRORS as error:
            raise TransferError(f"no memory can be registered: {error!r}", FailureKind.PEER_LOST) from error
        ours = entry_spans(buffer.address, [(run.local, run.count) for run in runs])
        read = NixlRead(self._open(), known, buffer=buffer)
        return self._post(read, (ours, -1), (theirs, -1)), buffer.result

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

    def close(self) -> None:
        if self._agent is None:
            return
        end_s = time.monotonic() + CLOSE_PATIENCE_S
        while any(peer.running for peer in self._peers.values()) and time.monotonic() < end_s:
            self.poll()
            time.sleep(0.001)
        for read in self._reads:
            read.cut()
        for peer in self._peers.values():
            self._remove(peer)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._agent = None  # the last reference: NIXL ends its connections

    def _open(self) -> nixl.nixl_agent:
        if self._agent is None:
            raise TransferError("this worker's transport is closed", FailureKind.CLOSED)
        return self._agent

    def _known(self, name: str) -> Remote:
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

    def _renew(self, peer: Remote, description: bytes) -> None:
        """A connection that failed is made again from nothing."""
        self._sweep()
        if peer.running:
            raise TransferError(f"reads over the lost connection to {peer.name} still run", FailureKind.PEER_LOST)
        self._forget(peer)
        self._add(description)

    def _post(self, read: NixlRead, ours: tuple[Spans, int], theirs: tuple[Spans, int]) -> NixlRead:
        try:
            read.post(ours, theirs)
        except NIXL_ERRORS as error:
            read.cut()
            raise TransferError(f"a read cannot be posted: {error!r}", FailureKind.PEER_LOST) from error
        self._reads.append(read)
        return read

    def _sweep(self) -> None:
        """Drives the reads; then forgets those that are closed, and the peers that only waited for theirs."""
        for read in self._reads:
            read.poll()
        self._reads = [read for read in self._reads if not read.closed]
        for peer in [peer for peer in self._peers.values() if peer.leaving and not peer.running]:
            self._forget(peer)

    def _forget(self, peer: Remote) -> None:
        self._remove(peer)
        self._peers.pop(peer.name, None)

    def _remove(self, peer: Remote) -> None:
        try:
            self._open().remove_remote_agent(peer.name)
        except NIXL_ERRORS as error:
            log.debug("%s was not removed: %r", peer.name, error)


def _silence_console() -> None:
    """NIXL prints INFO lines on standard output; its warnings now go where those of any library go."""
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(logging.WARNING)
