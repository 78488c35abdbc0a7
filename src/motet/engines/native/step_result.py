"""What one step of the engine brought; sent to the API process as one message."""

from dataclasses import dataclass, field

from motet.errors import MotetError
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange
from motet.transfer.base import Met
from motet.transfer.ticket import Ticket
from motet.types import GroupDelta


@dataclass(frozen=True)
class StepResult:
    deltas: list[GroupDelta]
    failures: dict[RequestId, MotetError]
    """Of groups that are gone now."""
    tickets: dict[RequestId, Ticket] = field(default_factory=dict)
    """Of groups that were prefilled for others."""
    blocks: list[BlockChange] = field(default_factory=list)
    """What the prefix cache can find from now on, and what not any more, in order."""
    met: list[Met] = field(default_factory=list)
    ran: bool = True
    """Whether anything was computed; if not, only a command or news can change that."""
