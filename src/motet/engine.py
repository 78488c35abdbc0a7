"""The seam of the system: everything that turns token ids into token ids is an `Engine`, also the router."""

from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from motet.ids import ModelName, RequestId
from motet.metrics.stats import EngineStats
from motet.models.checkpoint import Checkpoint, TensorFacts
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineKind, GenerateRequest, GroupDelta, Role


class GroupStream(Protocol):
    """The deltas of one group, in order, until every choice has finished.

    Iterating raises `RequestError` if the group can never run here, or an `EngineError`; then the group is over. This
    is an object and not a generator because `aclose` must free the group even if no client ever iterated over it.
    """

    def __aiter__(self) -> AsyncIterator[GroupDelta]: ...

    def __anext__(self) -> Awaitable[GroupDelta]: ...

    async def aclose(self) -> None:
        """Ends the group: its blocks are free one step later at the latest. May be called at any time, twice too."""
        ...


class Engine(Protocol):
    """Turns prompts into choices. All methods belong to one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest) -> GroupStream:
        """Submits a group at once (not at the first `__anext__`). If it has a ticket, the engine notifies the lease
        when the group does not need it any more, however the group ends. May raise at once what the stream would
        raise."""
        ...

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Computes the KV of the prompt without its last token, and keeps it for `readers`. It has at least two tokens.

        Cancelling it frees the group, and the lease if there is one already. Raises what `generate` raises."""
        ...

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        """Ends the lease of a ticket that no reader will use. Never raises: a lease that cannot be reached expires.
        `trace`: the client's request id, for other servers' logs."""
        ...

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        """Ends one choice early, e.g. at a stop string. After this returns, only deltas that were on their way come;
        the stream ends when the last choice has ended. Unknown ids and ended choices are ignored."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Ends all groups with `EngineClosedError` and frees everything. May be called twice."""
        ...


@runtime_checkable
class Killable(Protocol):
    """An engine in a process that this server has started."""

    def kill(self) -> None:
        """Ends the process as the system would: nothing that it has not sent comes any more."""
        ...


class PreparedWeights(msgspec.Struct, frozen=True):
    """New weights that an engine has read, and that do not serve yet."""

    tensors: int
    seconds: float
    """How long it took."""
    whole: bool
    """True if they are all tensors of the model."""
    digest: str
    """Names the content of all weights that the engine then has."""


@dataclass(frozen=True)
class WeightUpdate:
    """New weights that all engines of a server have got."""

    version: str
    slowest: str
    """The id of the worker that was the last to have read them."""
    seconds: float
    """How long that one took to read them."""


@runtime_checkable
class Renewable(Protocol):
    """An engine that can get new weights while it lives."""

    @property
    def info(self) -> EngineInfo: ...

    async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
        """Reads new weights while the old ones serve. Those prepared before are dropped. Raises RequestError, which
        names the tensor or the file, if they cannot be used."""
        ...

    async def apply_weights(self, version: str) -> None:
        """Puts the prepared weights in the place of the old ones; `info` tells of them from then on. Raises EngineError
        if none are prepared."""
        ...

    def drop_weights(self) -> None:
        """Forgets prepared weights."""
        ...

    async def name_weights(self, version: str) -> None:
        """Calls the weights that serve by another version."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of what the engine has in place of each tensor of a checkpoint."""
        ...

    async def hold(self, held: bool) -> None:
        """Stops all groups between two steps, or lets them go on. They keep all they have."""
        ...

    async def forget_prefixes(self, *, anew: bool) -> None:
        """Empties the prefix cache. Groups under way keep their KV, or compute it `anew`."""
        ...


@runtime_checkable
class Sleeping(Renewable, Protocol):
    """An engine on this machine, whose memory others may want for a while."""

    async def sleep(self, *, weights: bool) -> None:
        """Gives the memory of the KV cache back, and with `weights` theirs. It must be held."""
        ...

    async def wake(self) -> None:
        """Takes the memory of the KV cache again."""
        ...


class TrainerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's NCCL group: how to meet, and in which form its tensors come. The trainer is rank 0."""

    rank: int
    """That of this server."""
    world_size: int
    master_address: str = ""
    """Where the trainer's store is."""
    master_port: int = 0
    unique_id: bytes = b""
    """The group's id, if the trainer has no store."""
    packed: bool
    """True if several tensors come in one broadcast."""
    buffer_bytes: int
    """A packed broadcast ends with the tensor that makes it larger than this."""
    num_buffers: int
    """Most broadcasts that are received at a time."""


class WeightReceiver(Protocol):
    """Receives tensors that a trainer broadcasts."""

    @property
    def device(self) -> str | None:
        """The device that receives; None if no engine of the server runs on one that can."""
        ...

    @property
    def joined(self) -> bool:
        """True from a join to `close`, even if the group has broken meanwhile."""
        ...

    async def join(self, group: TrainerGroup) -> None:
        """Leaves the group before, and returns when all ranks of the new one have met. Raises EngineError."""
        ...

    async def receive(self, tensors: Sequence[TensorFacts], path: Path, *, at: int) -> None:
        """Returns when the trainer has sent all these tensors and they are in the file from `at` on. Raises
        EngineError; then the group is broken."""
        ...

    async def close(self) -> None:
        """Leaves the group. What waits for the trainer fails. May be called at any time, twice too."""
        ...


class SleepTag(StrEnum):
    """What an engine that sleeps has given up, in vLLM's words."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"
    """It computes nothing; over when all else is awake."""


class WorkerState(StrEnum):
    """The state of a worker. Only one that is ready gets new groups."""

    STARTING = "starting"
    """It has not answered yet, or its process is being started again."""
    READY = "ready"
    DRAINING = "draining"
    """It finishes its groups and takes no new ones."""
    SILENT = "silent"
    """It gives no sign of life; its groups go on elsewhere."""
    DEAD = "dead"


ANSWERING = (WorkerState.READY, WorkerState.DRAINING)
"""The states in which a worker answers questions."""


@dataclass(frozen=True)
class Worker:
    """An engine with the name and address that routing knows it by."""

    id: str
    """A name such as `prefill-0`, which never changes."""
    engine: Engine
    address: str
    """Its URL, or the address of its side channel."""
    local: bool = True
    """True if this server publishes its figures."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker as `/status` shows it. Role and kind are None until somebody has reached it; `worker` is None if it has
    no engine to ask; `models` lists the models beside its engine's own."""

    id: str
    address: str
    state: WorkerState
    role: Role | None = None
    worker: Worker | None = None
    last_decision: str | None = None
    """The reason why it got its last group."""
    note: str | None = None
    """The reason for its state, if there is something to say."""
    kind: EngineKind | None = None
    models: tuple[ModelName, ...] = ()
    resumable: bool = True
    """True if its answers can go on elsewhere when it is lost."""


class Workers(Protocol):
    """The workers behind a server, which join, leave, die and return while it runs."""

    def reports(self) -> Sequence[WorkerReport]:
        """Returns all workers at this moment, in the order in which they joined."""
        ...
