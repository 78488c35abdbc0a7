"""Messages between the API process and an engine process: msgspec over two ZeroMQ pipes, one for each direction.

    API process ── Command ──► engine process        ipc://FOLDER/commands
    API process ◄── Event ───  engine process        ipc://FOLDER/events

Many commands may come between two steps; a step sends one event, whatever the number of groups and choices. A second
thread of the engine process sends a Beat twice a second, through a connection of its own to the same address.
"""

import contextlib
import shutil
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from motet.engine import PreparedWeights
from motet.engines.wire import CarriedError
from motet.errors import StartupError
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange
from motet.metrics.stats import EngineStats
from motet.models.checkpoint import CheckpointKind
from motet.settings.server_config import EngineConfig
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineInfo, GenerateRequest, GroupDelta


class Launch(msgspec.Struct, frozen=True):
    """The engine to start, as a line of JSON on the engine process's standard input."""

    config: EngineConfig
    folder: str
    """Where the pipes are until the engine is connected; if both processes end before, the last one removes it."""

    def address(self, pipe: Literal["commands", "events"]) -> str:
        return f"ipc://{self.folder}/{pipe}"


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute the prompt for others; it ends in a ticket or a failure, unless it is aborted."""

    request: GenerateRequest
    readers: int


class Release(msgspec.Struct, frozen=True, tag=True):
    ticket: Ticket


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connect to another worker; answered by Connected."""

    number: int
    address: TransferAddress


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: RequestId


class StopChoiceCommand(msgspec.Struct, frozen=True, tag=True):
    request_id: RequestId
    index: int


class AskStats(msgspec.Struct, frozen=True, tag=True):
    number: int
    """The answer has the same number."""
    check: bool = False
    """Run the consistency checks too; a failed one ends the process."""


class PrepareWeights(msgspec.Struct, frozen=True, tag=True):
    """Read new weights while the old ones serve; answered by WeightsPrepared. Those prepared before are dropped."""

    number: int
    kind: CheckpointKind
    paths: tuple[str, ...]


class ApplyWeights(msgspec.Struct, frozen=True, tag=True):
    """Put the prepared weights in the place of the old ones; answered by Renewed."""

    number: int
    version: str


class NameWeights(msgspec.Struct, frozen=True, tag=True):
    """Call the weights that serve by another version; answered by Renewed."""

    number: int
    version: str


class SumWeights(msgspec.Struct, frozen=True, tag=True):
    """Compute the checksums of the weights that serve; answered by Checksums."""

    number: int


class DropWeights(msgspec.Struct, frozen=True, tag=True):
    """Forget prepared weights."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Compute nothing from now on, or go on; answered by Obeyed. Groups keep all they have."""

    number: int
    held: bool


class ForgetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache; answered by Obeyed."""

    number: int
    anew: bool
    """True if groups under way must compute their KV anew."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give the memory of the KV cache back to the system; answered by Obeyed. The engine is held already."""

    number: int
    weights: bool
    """True if the weights' memory is given back too."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Take the memory of the KV cache again; answered by Obeyed."""

    number: int


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


Command = (
    Submit
    | Prefill
    | Release
    | Connect
    | Abort
    | StopChoiceCommand
    | AskStats
    | PrepareWeights
    | ApplyWeights
    | NameWeights
    | SumWeights
    | DropWeights
    | Hold
    | ForgetPrefixes
    | Sleep
    | Wake
    | Close
)


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; the process ends after this."""

    error: CarriedError


class StepReport(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The results of a step; the fields are those of `core.StepResult`."""

    deltas: list[GroupDelta] = []
    failures: dict[RequestId, CarriedError] = {}
    tickets: dict[RequestId, Ticket] = {}
    blocks: list[BlockChange] = []


class Connected(msgspec.Struct, frozen=True, tag=True):
    number: int
    failure: str | None
    """Why the two could not connect; None if they are connected."""


class Stats(msgspec.Struct, frozen=True, tag=True):
    number: int
    stats: EngineStats


class WeightsPrepared(msgspec.Struct, frozen=True, tag=True):
    number: int
    facts: PreparedWeights | None
    failure: CarriedError | None = None
    """Why they cannot be used."""


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """All that comes after this was written with these weights. Without weights that were prepared, nothing changed."""

    number: int
    info: EngineInfo | None


class Checksums(msgspec.Struct, frozen=True, tag=True):
    number: int
    sums: dict[str, str]
    """By the names of the tensors in a checkpoint."""


class Obeyed(msgspec.Struct, frozen=True, tag=True):
    """An order with this number has been carried out."""

    number: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life. It has a connection of its own, so it may overtake other events."""

    busy_s: float
    """Seconds that the present step has taken so far; 0 between two steps."""


Event = (
    Ready | StartFailed | StepReport | Connected | Stats | WeightsPrepared | Renewed | Checksums | Obeyed | Heartbeat
)


class Pipes:
    """The API process's ends of the two pipes, made before the engine process is started, so that it finds them.

    Their folder is there until the engine is connected. After that there is nothing to remove, so nothing is left if
    both are killed at once: by a machine that is out of memory, or by Ray, which also kills a replica's children.
    """

    def __init__(self, launch: Launch) -> None:
        """Raises StartupError, and removes the folder, if the sockets cannot be opened."""
        self._folder = launch.folder
        self._folder_is_needed = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove_folder)
            try:
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                undo.callback(context.term)
                self._commands = context.socket(zmq.PUSH)
                undo.callback(self._commands.close, linger=0)
                # What an engine has not taken yet is kept here: groups are bounded by admission, not by this pipe.
                self._commands.set_hwm(0)
                self._commands.bind(launch.address("commands"))
                self._events = zmq.asyncio.Context(context).socket(zmq.PULL)
                undo.callback(self._events.close, linger=0)
                self._events.bind(launch.address("events"))
            except zmq.ZMQError as exc:  # too many files are open, or the name of the folder is too long
                raise StartupError(f"no pipes to an engine process can be made in {launch.folder}: {exc}") from exc
            self._closing = undo.pop_all()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

    def send(self, command: Command) -> None:
        """Never blocks."""
        with contextlib.suppress(zmq.Again):  # the other end is gone: its death is reported elsewhere
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def receive(self) -> Event:
        return self._decoder.decode(await self._events.recv())

    def beaten(self) -> None:
        """Called when a Beat has come after Ready: both came through connections that the engine has made. Once its
        third connection, for commands, is there too, the folder is not needed any more."""
        if self._folder_is_needed and self._commands.poll(0, zmq.POLLOUT):
            self._remove_folder()

    def close(self) -> None:
        self._closing.close()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder_is_needed = False
