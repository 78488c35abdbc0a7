"""Who holds a ticket, and how it ends: its readers acknowledge it, its last holder releases it, or its lease expires.

A prefill worker has granted the ticket, or a client has sent it. Each part of the group may read it, on the part's
worker. The lease waits for all its readers, so a ticket that a part has not read is released as soon as no part
needs it."""

import asyncio
import logging

from motet.engine import ANSWERING, Worker
from motet.engine_info import EngineKind
from motet.metrics.routing import TicketLog
from motet.routing.workers.fleet import Fleet
from motet.transfer.ticket import Ticket

logger = logging.getLogger(__name__)


class TicketReleases:
    """Releases tickets through the workers of a fleet. Owns the tasks that release them."""

    def __init__(self, fleet: Fleet, *, log: TicketLog | None) -> None:
        """`log`: counts the tickets that no worker could release."""
        self._fleet = fleet
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()

    async def release(self, ticket: Ticket, trace: str = "") -> None:
        """Ends the lease of a ticket that no worker will read. `trace`: the request id of the client."""
        if (worker := releasing_worker(ticket, self._fleet)) is not None:
            await worker.engine.release(ticket, trace=trace)
            return
        if self._log is not None:
            self._log.left(ticket)
        logger.info("no worker can release the ticket of %s: its lease expires", ticket.remote_request_id)

    def start(self, ticket: Ticket, trace: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self.release(ticket, trace))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raises AssertionError if a ticket is being released."""
        if self._tasks:
            raise AssertionError(f"{len(self._tasks)} tickets are being released")


def releasing_worker(ticket: Ticket, fleet: Fleet) -> Worker | None:
    """Returns a worker that can end the lease of a ticket, or None if no worker can, so that the lease expires. For a
    Motet engine's ticket, this is the engine that made it, or any Motet engine, which reaches the maker over the side
    channel. For a third-party ticket, it is a decode worker that could read it, or else any third-party worker."""
    answering = [member for member in fleet.members if member.state in ANSWERING and member.worker is not None]
    motet = [member for member in answering if member.facts.kind is EngineKind.MOTET]
    if ticket.foreign:
        others = [member for member in answering if member not in motet]
        maker = fleet.catalog.maker(ticket.remote_engine_id)
        key = None if maker is None else maker.facts.pair_key
        able = [other for other in others if other.facts.can_fetch and key in (None, other.facts.pair_key)] or others
    else:
        able = [member for member in motet if member.facts.engine_id == ticket.remote_engine_id] or motet
    return able[0].worker if able else None


class HeldTicket:
    """A ticket with the number of parts of its group that may still read it."""

    def __init__(
        self, ticket: Ticket, releases: TicketReleases, *, parts: int, trace: str = "", from_client: bool = False
    ) -> None:
        """`from_client`: the client sent the ticket; otherwise a prefill worker of this router granted it. A client's
        ticket is released only if no engine has received it: the engine acknowledges it, and it can have other
        readers."""
        self.ticket = ticket
        self.from_client = from_client
        self._releases = releases
        self._trace = trace
        self._holders = parts
        """Number of parts that may still read the ticket."""
        self._unread = 1 if from_client else max(ticket.readers, parts)
        """Number of readers for which the lease waits."""
        self._releasing: asyncio.Task[None] | None = None

    def acknowledge(self) -> None:
        """Records that the worker of a part has read the ticket. Each part calls this or `release`, once."""
        self._unread -= 1
        self.release()

    def release(self) -> None:
        """Records that a part does not need the ticket any more. The last part releases it, if a reader is left."""
        self._holders -= 1
        if not self._holders and self._unread:
            self._releasing = self._releases.start(self.ticket, self._trace)

    async def wait_released(self) -> None:
        """Waits until the ticket has been released, if it must be."""
        if self._releasing is not None:
            await asyncio.wait((self._releasing,))
