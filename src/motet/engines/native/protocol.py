"""Messages between the API process and an engine process: msgspec over two ZeroMQ pipes, one for each direction.

    API process ── Command ──► engine process        ipc://FOLDER/commands
    API process ◄── Event ───  engine process        ipc://FOLDER/events

Many commands may come between two steps; a step sends one event, whatever the number of groups and choices. A second
thread of the engine process sends a Beat twice a second, through a connection of its own to the same address.
"""

import msgspec

from motet.config import EngineConfig
from motet.engines.wire import CarriedError
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange
from motet.transfer.base import FailureKind
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineInfo, EngineStats, GenerateRequest, GroupDelta


class Launch(msgspec.Struct, frozen=True):
    """The line of JSON on an engine process's standard input."""

    config: EngineConfig
    folder: str
    """Where the pipes are until the engine is connected; if both processes end before, the last one removes it."""

    @property
    def commands_address(self) -> str:
        return f"ipc://{self.folder}/commands"

    @property
    def events_address(self) -> str:
        return f"ipc://{self.folder}/events"


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute the prompt for others; ends in a ticket or a failure, unless it is aborted."""

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


class StopChoice(msgspec.Struct, frozen=True, tag=True):
    request_id: RequestId
    index: int


class AskStats(msgspec.Struct, frozen=True, tag=True):
    number: int
    """Comes back with the answer."""
    check: bool = False
    """Run the consistency checks too; a failed one ends the process."""


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Submit | Prefill | Release | Connect | Abort | StopChoice | AskStats | Close


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Unable(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; the process ends after this."""

    error: CarriedError


class Stepped(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    deltas: list[GroupDelta] = []
    failures: dict[RequestId, CarriedError] = {}
    tickets: dict[RequestId, Ticket] = {}
    """Of groups that were prefilled for others."""
    blocks: list[BlockChange] = []
    """What the prefix cache can find from now on, and what not any more, in order."""


class CarriedTransferError(msgspec.Struct, frozen=True, array_like=True):
    kind: FailureKind
    message: str


class Connected(msgspec.Struct, frozen=True, tag=True):
    number: int
    failure: CarriedTransferError | None
    """None: the two know each other."""


class Stats(msgspec.Struct, frozen=True, tag=True):
    number: int
    stats: EngineStats


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life. By a connection of its own: it may overtake other events."""

    busy_s: float
    """How long the process has been in its present step; 0 between two."""


Event = Ready | Unable | Stepped | Connected | Stats | Beat
