"""Orders to an engine and their answers, declared once for all processes that send or forward them.

    control ── order ──► NativeEngine ── pipe ──────────────► engine process
       │                                  ◄── answer ─────────
       └────── order ──► RemoteEngine ── POST /engine/order ─► EngineControl of that server ──► its engines
                                          ◄── answer ─────────

An order is the same struct over the pipe and over HTTP. An engine answers when it has carried out the order. If it
refuses the order, the answer is an error: a `CarriedError` on the pipe, a status code over HTTP.

The nouns of weights, used everywhere:

    Checkpoint         tensors to read: files, files in memory, zeros, or the weights of the start (`models.checkpoint`)
    PreparedWeights    the weights that an engine has read from a checkpoint, while its old weights still serve
    WeightUpdate       the result of an update: all engines of a server serve with the prepared weights

An engine prepares a checkpoint, then applies or drops the prepared weights. A version names the weights that serve."""

import msgspec

from motet.engine_info import FIRST_VERSION, EngineInfo
from motet.ids import ModelName
from motet.metrics.stats import EngineStats
from motet.models.checkpoint import Checkpoint, CheckpointKind
from motet.transfer.ticket import TransferAddress


class PrepareWeights(msgspec.Struct, frozen=True, tag=True):
    """Reads a checkpoint while the engine serves. Earlier prepared weights are dropped. Answer: PreparedWeights."""

    kind: CheckpointKind
    paths: tuple[str, ...] = ()
    """Folders or files. Over HTTP, files in memory are uploaded before the order, one for each path."""
    base: str = ""
    """Digest of the weights that have the other tensors of a checkpoint with some of the model's tensors, as reported
    by the engines that have applied the checkpoint before. Empty means the weights that serve."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, base: str = "") -> "PrepareWeights":
        return cls(checkpoint.kind, tuple(map(str, checkpoint.paths)), base)


class ApplyWeights(msgspec.Struct, frozen=True, tag=True):
    """Replaces the weights that serve by the prepared ones, between two steps. Answer: EngineFacts."""

    version: str
    digest: str = ""
    """Digest of the prepared weights to apply. If it is empty, any prepared weights are applied."""


class DropWeights(msgspec.Struct, frozen=True, tag=True):
    """Drops the prepared weights."""

    digest: str = ""
    """Digest of the prepared weights to drop. If it is empty, any are dropped, even if they are still being read."""


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
    """True if running groups must recompute their KV; otherwise they keep it."""


INVALID_ADAPTER = "invalid_adapter"
"""Code of the error about an adapter that an engine cannot use."""
ADAPTER_NOT_FOUND = "adapter_not_found"
"""Code of the error about a folder that does not exist, or has no adapter."""
ADAPTER_EXISTS = "adapter_exists"
"""Code of the error about an adapter that is already loaded, in answer to an order without `in_place`."""
TOO_MANY_ADAPTERS = "too_many_adapters"
"""Code of the error of an engine that has loaded its maximum number of adapters."""


ADAPTER_CODES = frozenset({INVALID_ADAPTER, ADAPTER_NOT_FOUND, ADAPTER_EXISTS, TOO_MANY_ADAPTERS})


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Loads a LoRA adapter while the engine serves, and uses it from the next step on. Answer: EngineFacts."""

    name: ModelName
    kind: CheckpointKind
    """`FILES` or `MEMORY`."""
    path: str
    """PEFT folder (`FILES`), or safetensors file (`MEMORY`), which is uploaded first if the order is sent over HTTP."""
    config: str = ""
    """Content of the adapter's `adapter_config.json` (`MEMORY`)."""
    root: str = ""
    """See `AdapterInfo.root`."""
    version: str = FIRST_VERSION
    in_place: bool = False
    """True if the adapter replaces a loaded one with this name, whose groups continue and recompute their KV."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Removes an adapter. Groups that run with it continue to their end. Answer: EngineFacts."""

    name: ModelName


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connects the engine to another worker before a request needs that worker's KV."""

    address: TransferAddress


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Releases the memory of the KV cache to the system. The engine must be held."""

    weights: bool
    """True if the memory of the weights is released too. The next step then needs a complete checkpoint."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Uses the memory of the KV cache again."""


class ReadStats(msgspec.Struct, frozen=True, tag=True):
    """Reads the current figures. Answer: EngineFigures."""

    check: bool = False
    """True if the consistency checks run too. A failed check ends the process."""


AdapterOrder = LoadAdapter | UnloadAdapter
WeightOrder = PrepareWeights | ApplyWeights | DropWeights | NameWeights | SumWeights
ControlOrder = WeightOrder | AdapterOrder | Hold | ForgetPrefixes
"""The orders that `EngineControl` carries out on all engines of a worker, for a gateway."""
WorkerOrder = ControlOrder | Connect
"""The orders that a gateway can give to a worker over HTTP, with the worker key."""
EngineOrder = WorkerOrder | Sleep | Wake | ReadStats
"""The orders that an engine process takes from the server that started it."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to an order that has been carried out."""


class PreparedWeights(msgspec.Struct, frozen=True, tag=True):
    """Weights that an engine has read, and that do not serve yet."""

    tensors: int
    seconds: float
    """Time in seconds that the engine took to read the weights."""
    complete: bool
    """True if the weights include all tensors of the model."""
    digest: str
    """Digest of all weights of the engine after the prepared weights are applied."""
    names: tuple[str, ...] = ()
    """Names of the tensors, unless they are all tensors of the model."""


class EngineFacts(msgspec.Struct, frozen=True, tag=True):
    """The new facts about the engine: all later deltas are generated with these weights and adapters."""

    info: EngineInfo


class Checksums(msgspec.Struct, frozen=True, tag=True):
    sums: dict[str, str]
    """SHA-256 of the engine's form of each tensor of a checkpoint, by the tensor's name."""


class EngineFigures(msgspec.Struct, frozen=True, tag=True):
    stats: EngineStats


OrderAnswer = Done | PreparedWeights | EngineFacts | Checksums | EngineFigures

ANSWERS: dict[type[EngineOrder], type[OrderAnswer]] = {
    PrepareWeights: PreparedWeights,
    ApplyWeights: EngineFacts,
    NameWeights: EngineFacts,
    SumWeights: Checksums,
    LoadAdapter: EngineFacts,
    UnloadAdapter: EngineFacts,
    ReadStats: EngineFigures,
}
"""The type of the answer to each order; all other orders are answered by `Done`."""


def memory_files(order: EngineOrder) -> tuple[str, ...]:
    """Returns the paths of the files in memory that an engine reads to carry out the order."""
    match order:
        case PrepareWeights(CheckpointKind.MEMORY, paths):
            return paths
        case LoadAdapter(kind=CheckpointKind.MEMORY, path=path):
            return (path,)
    return ()


def is_answer_to(order: EngineOrder, answer: OrderAnswer) -> bool:
    """Returns True if the answer has the type that belongs to the order."""
    return type(answer) is ANSWERS.get(type(order), Done)
