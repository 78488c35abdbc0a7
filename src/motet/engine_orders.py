"""Orders to an engine and their answers: one declaration for every process that passes them on.

    control ── order ──► NativeEngine ── pipe ──────────────► engine process
       │                                  ◄── answer ─────────
       └────── order ──► RemoteEngine ── POST /engine/order ─► EngineControl of that server ──► its engines
                                          ◄── answer ─────────

An order is the same struct on each of these ways. An engine answers when it has carried the order out. If it refuses
the order, the answer is an error: a `CarriedError` on the pipe, a status code over HTTP.

The nouns of weights, used everywhere:

    Checkpoint         tensors to read: files, files in memory, zeros, or the weights of the start (`models.checkpoint`)
    PreparedWeights    what an engine has read of a checkpoint, while its present weights still serve
    WeightUpdate       the result of an update: all engines of a server serve with the prepared weights

An engine prepares a checkpoint, and then applies or drops what it has prepared. A version is the name of the weights
that serve.
"""

import msgspec

from motet.metrics.stats import EngineStats
from motet.models.checkpoint import Checkpoint, CheckpointKind
from motet.transfer.ticket import TransferAddress
from motet.types import EngineInfo


class PrepareWeights(msgspec.Struct, frozen=True, tag=True):
    """Reads a checkpoint while the engine serves. Earlier prepared weights are dropped. Answer: PreparedWeights."""

    kind: CheckpointKind
    paths: tuple[str, ...] = ()
    """Folders or files. Over HTTP, files in memory are uploaded before the order, one for each path."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "PrepareWeights":
        return cls(checkpoint.kind, tuple(map(str, checkpoint.paths)))


class ApplyWeights(msgspec.Struct, frozen=True, tag=True):
    """Replaces the weights that serve by the prepared ones, between two steps. Answer: EngineFacts."""

    version: str
    digest: str = ""
    """Digest of the prepared weights to apply. If it is empty, any prepared weights are applied."""


class DropWeights(msgspec.Struct, frozen=True, tag=True):
    """Forgets the prepared weights."""

    digest: str = ""
    """Digest of the prepared weights to drop. Empty for any weights, also if they are still being read."""


class NameWeights(msgspec.Struct, frozen=True, tag=True):
    """Gives the weights that serve another version. Answer: EngineFacts."""

    version: str


class SumWeights(msgspec.Struct, frozen=True, tag=True):
    """Computes the checksums of the weights that serve, which must not change during this time. Answer: Checksums."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Stops all groups between two steps, or lets them continue. They keep their KV and their output tokens."""

    held: bool


class ForgetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Empties the prefix cache."""

    recompute: bool
    """True if running groups must recompute their KV; else they keep it."""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connects the engine to another worker before a request needs that worker's KV."""

    address: TransferAddress


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Releases the memory of the KV cache to the system. The engine must be held."""

    weights: bool
    """True if the memory of the weights is released too. The next step then needs a complete checkpoint."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Takes the memory of the KV cache again."""


class ReadStats(msgspec.Struct, frozen=True, tag=True):
    """Reads the figures of this moment. Answer: EngineFigures."""

    check: bool = False
    """True if the consistency checks run too. A failed check ends the process."""


ControlOrder = PrepareWeights | ApplyWeights | DropWeights | NameWeights | SumWeights | Hold | ForgetPrefixes
"""The orders that `EngineControl` carries out on all engines of a worker, for a gateway."""
WorkerOrder = ControlOrder | Connect
"""The orders that a gateway can give to a worker over HTTP, with the worker key."""
EngineOrder = WorkerOrder | Sleep | Wake | ReadStats
"""The orders that an engine process takes from the server that started it."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to an order that has been carried out."""


class PreparedWeights(msgspec.Struct, frozen=True, tag=True):
    """The weights that an engine has read, and that do not serve yet."""

    tensors: int
    seconds: float
    """Time that the engine took to read them."""
    complete: bool
    """True if they are all tensors of the model."""
    digest: str
    """Names the content of all weights of the engine once these are applied."""


class EngineFacts(msgspec.Struct, frozen=True, tag=True):
    """The facts about the engine from now on: all deltas that come later are generated with these weights."""

    info: EngineInfo


class Checksums(msgspec.Struct, frozen=True, tag=True):
    sums: dict[str, str]
    """SHA-256 of what the engine has in the place of each tensor of a checkpoint, by the tensor's name."""


class EngineFigures(msgspec.Struct, frozen=True, tag=True):
    stats: EngineStats


OrderAnswer = Done | PreparedWeights | EngineFacts | Checksums | EngineFigures

ANSWERS: dict[type[EngineOrder], type[OrderAnswer]] = {
    PrepareWeights: PreparedWeights,
    ApplyWeights: EngineFacts,
    NameWeights: EngineFacts,
    SumWeights: Checksums,
    ReadStats: EngineFigures,
}
"""The kind of the answer to each order; `Done` to all others."""


def is_answer_to(order: EngineOrder, answer: OrderAnswer) -> bool:
    """Returns True if the answer is of the kind that belongs to the order."""
    return type(answer) is ANSWERS.get(type(order), Done)
