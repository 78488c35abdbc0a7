"""A read that NIXL was asked for, from its posting to the moment when nothing can write into its destination any more.

The rule of this file: a read that is not final may write at any time, hours later if its peer was stopped, whatever was
cancelled, released or removed meanwhile (NIXL returns at once from all of these, and the bytes still land). So a handle
is released only when its read is final, or with the whole agent, whose connections end with it.
"""

import logging
from dataclasses import dataclass

import nixl  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import numpy.typing as npt

from motet.transfer.base import ReadState
from motet.transfer.layout import Memory
from motet.transfer.spans import Spans, entry_spans

NIXL_ERRORS: tuple[type[Exception], ...] = (
    nixl.nixlBackendError,
    nixl.nixlCancelledError,
    nixl.nixlInvalidParamError,
    nixl.nixlMismatchError,
    nixl.nixlNotAllowedError,
    nixl.nixlNotFoundError,
    nixl.nixlNotPostedError,
    nixl.nixlNotSupportedError,
    nixl.nixlRemoteDisconnectError,
    nixl.nixlRepostActiveError,
    nixl.nixlUnknownError,
    # What its bindings make of numbers and names that do not fit.
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)

log = logging.getLogger(__name__)


@dataclass
class Remote:
    """A worker that can be read from."""

    name: str
    memory: Memory
    running: int = 0
    """Reads that are not final."""
    broken: bool = False
    """Its connection has failed, and does not come back by itself."""
    leaving: bool = False
    """To be removed when none of its reads runs any more."""


class ProofBuffer:
    """Registered memory for entries of a proof, each once and in ascending order."""

    def __init__(self, agent: nixl.nixl_agent, num_entries: int, order: npt.NDArray[np.intp]) -> None:
        """`order`: which of them were asked for."""
        self._values = np.zeros(num_entries, np.int64)
        self._order = order
        self._registered = register(agent, entry_spans(self.address, [(0, num_entries)]), device=-1)
        self.result: list[int] = []

    @property
    def address(self) -> int:
        return self._values.ctypes.data

    def fill(self) -> None:
        self.result.extend(self._values[self._order].tolist())

    def free(self, agent: nixl.nixl_agent) -> None:
        agent.deregister_memory(self._registered)


class NixlRead:
    """A read of blocks, or of entries of a proof into a buffer of its own."""

    def __init__(self, agent: nixl.nixl_agent, peer: Remote, *, buffer: ProofBuffer | None = None) -> None:
        self.num_bytes = 0
        self.num_descriptors = 0
        self.closed = False
        self._agent = agent
        self._peer = peer
        self._buffer = buffer
        self._handle: nixl.nixl_xfer_handle | None = None
        self._state = ReadState.RUNNING

    def post(self, ours: tuple[Spans, int], theirs: tuple[Spans, int]) -> None:
        """Spans and their device on both sides, pair by pair. Raises what NIXL raises; then the read is to be `cut`."""
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
        """It never got under way, or the agent is going and takes with it whatever could write."""
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
        elif self._buffer is not None:
            self._buffer.fill()

    def _let_go(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            if self._handle is not None:
                self._agent.release_xfer_handle(self._handle)
            if self._buffer is not None:
                self._buffer.free(self._agent)
        except NIXL_ERRORS as error:
            log.debug("read from %s was not released: %r", self._peer.name, error)
        self._handle = self._agent = None


def register(agent: nixl.nixl_agent, spans: Spans, device: int) -> nixl.nixlRegDList:
    """Makes memory known to the agent; what it returns is for `deregister_memory`."""
    return agent.register_memory(*as_table(spans, device))


def as_table(spans: Spans, device: int) -> tuple[npt.NDArray[np.uint64], str]:
    """Spans as NIXL takes them: [num_spans, 3] of address, length and device, and the type of memory."""
    devices = np.full((len(spans), 1), max(device, 0), np.uint64)
    return np.concatenate([spans, devices], axis=1), "DRAM" if device < 0 else "VRAM"
