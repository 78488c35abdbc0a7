"""What becomes of tickets between vLLM servers, counted and remembered for a while.

All engines of a gateway share one of these.
"""

from collections import Counter, OrderedDict
from enum import StrEnum

from motet.transfer.ticket import Ticket

REMEMBERED = 4096
"""Tickets. They are asked for again within one group's life, if at all."""


class PullFallback(StrEnum):
    """Why a group did without the KV that its ticket promised; a label of the metric."""

    LATE = "late"
    """Its first token did not come in time."""
    FAILED = "failed"
    """The decode server ended the request that had the ticket."""


class TicketEnd(StrEnum):
    """What became of a ticket."""

    TAKEN = "taken"
    """By a decode server, which reads what it is for, or tells that it will not."""
    RELEASED = "released"
    """Unused; the prefill server was told at once."""
    LEFT = "left"
    """Unused, and nobody could tell: its lease ends by itself, unless somebody else gives it back."""


UNUSED = (TicketEnd.RELEASED, TicketEnd.LEFT)


class PDFigures:
    """All labels are there from the beginning."""

    def __init__(self) -> None:
        self.pull_fallbacks = Counter[str]({reason.value: 0 for reason in PullFallback})
        self.tickets_unused = Counter[str]({end.value: 0 for end in UNUSED})
        self._ends: OrderedDict[tuple[str, str], TicketEnd] = OrderedDict()
        """Of the last tickets: more than one may give back the same, as nobody sees all of its way."""

    def is_over(self, ticket: Ticket) -> bool:
        """Whether there is nothing left to give back."""
        return self._ends.get(_name(ticket), TicketEnd.LEFT) is not TicketEnd.LEFT

    def left(self, ticket: Ticket) -> None:
        """Nobody was there to give it back."""
        if ticket.foreign and not self.is_over(ticket):
            self.ended(ticket, TicketEnd.LEFT)

    def ended(self, ticket: Ticket, end: TicketEnd) -> None:
        """Said twice, it counts once."""
        name = _name(ticket)
        if self._ends.get(name) is end:
            return
        if end in UNUSED:
            self.tickets_unused[end.value] += 1
        self._ends[name] = end
        if len(self._ends) > REMEMBERED:
            self._ends.popitem(last=False)


def _name(ticket: Ticket) -> tuple[str, str]:
    return ticket.remote_engine_id, ticket.remote_request_id
