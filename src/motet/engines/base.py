"""The seam of the system: whatever turns token ids into token ids is an `Engine`, and so is what wraps one."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from motet.errors import MotetError
from motet.ids import ModelName, RequestId
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineKind, EngineStats, GenerateRequest, GroupDelta, Role


class GroupStream(Protocol):
    """The deltas of one group, in order, until every choice has finished.

    Iterating raises `RequestError` (the group can never run here), `EngineDiedError`, `EngineClosedError` or
    `EngineError`; then the group is over. It is an object and not a generator because `aclose` must free the group
    also when nobody ever started to iterate.
    """

    def __aiter__(self) -> "GroupStream": ...

    async def __anext__(self) -> GroupDelta: ...

    async def aclose(self) -> None:
        """Ends the group: its blocks are free one step later at the latest. May be called at any time, twice too."""
        ...


class NoGroup:
    """The stream of a group that was not taken."""

    def __init__(self, error: MotetError) -> None:
        self._error = error

    def __aiter__(self) -> "NoGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        raise self._error

    async def aclose(self) -> None:
        """There is nothing to free."""


class Engine(Protocol):
    """Turns prompts into choices. All methods belong to one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest) -> GroupStream:
        """Submits a group at once (not at the first `__anext__`). If it has a ticket, the lease is told when the group
        has no more use for it, whatever becomes of the group."""
        ...

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Computes the KV of the prompt (without its last token, so it has two at least) and keeps it for `readers`.

        Cancelling it frees the group, and the lease if there is one already. Raises what `generate` raises."""
        ...

    async def release(self, ticket: Ticket) -> None:
        """Ends the lease of a ticket that no reader will use. Never raises: a lease that cannot be reached expires."""
        ...

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        """Ends one choice early, e.g. at a stop string. No delta of it comes after this returns but those under way;
        the stream ends when the last choice has ended. Unknown ids and ended choices are ignored."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Ends all groups with `EngineClosedError` and frees everything. May be called twice."""
        ...


class WorkerState(StrEnum):
    """What can be expected of a worker. Only one that is ready gets new groups."""

    STARTING = "starting"
    """Never heard of yet, or its process is being started again."""
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has."""
    SILENT = "silent"
    """Gives no sign of life; its groups go on elsewhere."""
    DEAD = "dead"


ANSWERING = (WorkerState.READY, WorkerState.DRAINING)
"""States of workers that can be asked something."""


@dataclass(frozen=True)
class Worker:
    """An engine as routing knows it."""

    id: str
    """Such as `prefill-0`, the same for life."""
    engine: Engine
    address: str
    """Where it can be reached: a URL, or the address of its side channel."""
    local: bool = True
    """Whether its figures are this server's to publish."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker as `/status` tells of it; it may be one that nobody has reached yet."""

    id: str
    address: str
    state: WorkerState
    role: Role | None = None
    """None: not known yet."""
    worker: Worker | None = None
    """None: there is no engine to ask."""
    last_decision: str | None = None
    """Why it got the last group it was given."""
    note: str | None = None
    """Why it is in its state, where there is something to say."""
    kind: EngineKind | None = None
    """None: not known yet."""
    models: tuple[ModelName, ...] = ()
    """What it serves beside its engine's own model."""
    resumable: bool = True
    """Whether what it writes can go on elsewhere, should it be lost."""


class Workers(Protocol):
    """The workers behind a server, which join, leave, die and return while it runs."""

    def reports(self) -> Sequence[WorkerReport]:
        """All of them at this moment, in the order in which they joined."""
        ...
