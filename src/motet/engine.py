"""The interface of engines: everything that turns token ids into token ids is an `Engine`, including the router."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from motet.engine_info import EngineInfo, EngineKind
from motet.engine_orders import EngineOrder, OrderAnswer
from motet.ids import ModelName, RequestId
from motet.metrics.stats import EngineStats
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta, Role


class GroupStream(Protocol):
    """The deltas of one group, in order, until every choice has finished.

    Iterating raises `RequestError` if the group can never run on this engine, or an `EngineError`; then the group is
    over. The stream is an object and not a generator, because `aclose` must free the group even if it was never read.
    """

    def __aiter__(self) -> AsyncIterator[GroupDelta]: ...

    def __anext__(self) -> Awaitable[GroupDelta]: ...

    async def aclose(self) -> None:
        """Ends the group. Its blocks are free one step later at the latest. Can be called at any time, and twice."""
        ...


class Engine(Protocol):
    """Turns prompts into choices. All methods belong to one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest) -> GroupStream:
        """Submits a group at once (not at the first `__anext__`). If the group has a ticket, the engine releases it as
        soon as the group does not need it any more, however the group ends. Can raise the errors of the stream."""
        ...

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Computes the KV of a prompt of at least two tokens, except for the last token, and holds it for `readers`.

        If the call is cancelled, the group and its lease are freed. Raises the errors of `generate`."""
        ...

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        """Releases a ticket that no reader will use. Never raises: if its maker cannot be reached, the lease expires.
        `trace`: the client's request id, for other servers' logs."""
        ...

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        """Ends one choice early, e.g. at a stop string. Deltas of the choice that were already sent can still arrive.
        The stream ends when the last choice has ended. Ignores unknown ids and ended choices."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Ends all groups with `EngineClosedError` and frees everything. Can be called twice."""
        ...


@runtime_checkable
class ControlledEngine(Protocol):
    """An engine that takes orders about weights, pauses and connections: a Motet engine, local or on another server."""

    @property
    def info(self) -> EngineInfo: ...

    async def send(self, order: EngineOrder) -> OrderAnswer:
        """Returns the answer once the order has been carried out and `info` is up to date. Raises the MotetError with
        which the engine refuses the order, or EngineDiedError if the engine ends first."""
        ...


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine on a third-party server that can load LoRA adapters at run time."""

    @property
    def info(self) -> EngineInfo: ...

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        """Loads an adapter. Raises MotetError, also if it exists already and `in_place` is False."""
        ...

    async def unload_adapter(self, name: str) -> None: ...


class WorkerState(StrEnum):
    """The state of a worker. Only ready workers get new groups."""

    STARTING = "starting"
    """The worker has not answered so far, or its process is being restarted."""
    READY = "ready"
    DRAINING = "draining"
    """The worker finishes its groups and takes no new ones."""
    SILENT = "silent"
    """The worker sends no heartbeats. Its groups move to other workers."""
    DEAD = "dead"


ANSWERING = (WorkerState.READY, WorkerState.DRAINING)
"""The states in which a worker answers calls."""


@dataclass(frozen=True)
class Worker:
    """An engine with its name and address in routing."""

    id: str
    """Name such as `prefill-0`, which never changes."""
    engine: Engine
    address: str
    """URL of the worker, or address of its side channel."""
    local: bool = True
    """True if this server publishes its figures."""
    kill: Callable[[], None] | None = None
    """Ends the engine's process with SIGKILL. None for an engine that this server has not started."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker as `/status` shows it. Role and kind are None until the worker has been reached."""

    id: str
    address: str
    state: WorkerState
    role: Role | None = None
    worker: Worker | None = None
    """The worker; None if it has no engine."""
    last_decision: str | None = None
    """Reason why it got its last group."""
    note: str | None = None
    """Reason for its state, if any."""
    kind: EngineKind | None = None
    models: tuple[ModelName, ...] = ()
    """The models other than its engine's own."""
    resumable: bool = True
    """True if other workers can continue its answers when it is lost."""
