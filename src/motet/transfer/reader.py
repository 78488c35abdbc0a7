"""The reader's side of the transfer thread: pulls, heartbeats and connections to the workers from which it reads.

KeepAlive ──► heartbeats ──► PullOrder ──► Pull ──► PullLanded or PullFailed (──► PullSettled)
                  └────────► ReleaseTicket: the lease is released
ConnectWorker ──► Peer ──► ConnectResult
"""

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from motet.transfer import orders
from motet.transfer.lease import Heartbeats
from motet.transfer.orders import FailureKind, TransferError, TransferEvent
from motet.transfer.peer import Peer, Peers
from motet.transfer.pull import Pull
from motet.transfer.ticket import Ticket

logger = logging.getLogger(__name__)

POLL_AFTER_PULL_S = 0.02
"""Time in seconds for which the transport is polled after a pull, so that its last messages are sent."""
FIRST_READ_S = 2.0
"""Time in seconds that the first read from a worker, which sets up the connection, can take after its answer."""


@dataclass(eq=False, kw_only=True)
class TrunkReader:
    """Carries out the orders that concern trunks of other workers. Owned by the transfer thread; never blocks. An
    unexpected error in a pull ends only that pull. Its blocks are settled when the transport is closed."""

    engine_id: str
    peers: Peers
    pull_timeout_s: float
    publish: Callable[[TransferEvent], None]
    clock: Callable[[], float]
    _pulls: dict[int, Pull] = field(init=False, default_factory=dict)
    """Pulls by the numbers of their orders."""
    _unsettled: list[int] = field(init=False, default_factory=list)
    """Numbers of pulls that ended with an unexpected error: their reads can write until the transport is closed."""
    _connecting: dict[int, tuple[Peer, float]] = field(init=False, default_factory=dict)
    """Peer and deadline of each `ConnectWorker`, by the number of the order."""
    _num_released: int = field(init=False, default=0)
    _poll_until_s: float = field(init=False, default=-math.inf)

    def __post_init__(self) -> None:
        self._heartbeats = Heartbeats(self.clock)

    @property
    def needs_polling(self) -> bool:
        """True if a read can be open, or messages about a read must still be sent: both need the transport's poll."""
        return bool(self._pulls or self._connecting) or self.peers.busy or self.clock() < self._poll_until_s

    @property
    def next_heartbeat_s(self) -> float | None:
        """Time of the next heartbeat for a ticket that is held; None while none is held."""
        return self._heartbeats.next_s

    def follow(self, order: orders.ReaderOrder, ordered_s: float) -> None:
        """Follows an order that was given at `ordered_s` by the clock. Raises TransferError if that is impossible."""
        match order:
            case orders.KeepAlive(ticket):
                self._heartbeats.hold(ticket)
            case orders.PullOrder(number, ticket):
                self._heartbeats.release(ticket)
                self._pulls[number] = Pull(
                    order=order,
                    peer=self.peers.at(ticket.address),
                    clock=self.clock,
                    reader=f"{self.engine_id}:{number}",
                    ordered_s=ordered_s,
                    timeout_s=self.pull_timeout_s,
                )
            case orders.AbandonPull(number):
                if pull := self._pulls.get(number):
                    self._publish_from(pull, pull.abandon())
            case orders.ReleaseTicket(ticket):
                self._heartbeats.release(ticket)
                self._release_lease(ticket)
            case orders.ConnectWorker(number, address):
                peer = self.peers.at(address)
                if peer.ready:
                    peer.channel.send_hello()  # it can have died since its last answer
                self._connecting[number] = peer, self.clock() + self.peers.terms.answer_s + FIRST_READ_S

    def advance(self) -> None:
        """Sends heartbeats that are due, and advances peers, pulls and connections as far as possible."""
        self._send_heartbeats()
        self.peers.advance()
        for pull in list(self._pulls.values()):
            self._advance(pull)
        self._check_connecting()

    def close(self) -> None:
        """Ends every pull, releases every lease that can be reached, and disconnects. Reads of unsettled pulls can
        write until the transport is closed; call `settle_all` after that."""
        for pull in list(self._pulls.values()):
            self._publish_from(pull, pull.close())
        for ticket in self._heartbeats.release_all():
            with contextlib.suppress(TransferError):  # a lease that cannot be released expires
                self._release_lease(ticket)
        for number in self._connecting:
            stopping = TransferError("this worker is stopping", FailureKind.CLOSED)
            self.publish(orders.ConnectResult(number, stopping))
        self.peers.close()

    def settle_all(self) -> None:
        """Reports all pulls as settled, after the transport was closed."""
        for number in (*self._pulls, *self._unsettled):
            self.publish(orders.PullSettled(number))

    def _send_heartbeats(self) -> None:
        for ticket in self._heartbeats.due():
            try:
                self.peers.at(ticket.address).channel.send_heartbeat(ticket.lease_id)
            except TransferError:
                pass  # the lease expires
            except Exception:
                logger.exception("cannot send a heartbeat to the worker at %s", ticket.remote_host)

    def _release_lease(self, ticket: Ticket) -> None:
        self._num_released += 1
        reader = f"{self.engine_id}:without-{self._num_released}"
        self.peers.at(ticket.address).channel.release(ticket.lease_id, reader)

    def _advance(self, pull: Pull) -> None:
        was_reported = pull.reported
        try:
            self._publish_from(pull, pull.advance())
        except Exception as error:
            logger.exception("the pull for %s failed", pull.order.label)
            del self._pulls[pull.order.number]
            self._unsettled.append(pull.order.number)
            if not was_reported:
                message = f"the pull from {pull.peer} failed: {error!r}"
                self.publish(orders.PullFailed(pull.order.number, FailureKind.PEER_LOST, message, settled=False))

    def _publish_from(self, pull: Pull, event: TransferEvent | None) -> None:
        """Publishes an event of a pull, if there is one, and removes the pull if it is over."""
        if pull.over:
            del self._pulls[pull.order.number]
            self._poll_until_s = self.clock() + POLL_AFTER_PULL_S
        if event is not None:
            logger.debug("pull for %s: %s", pull.order.label, event)
            self.publish(event)

    def _check_connecting(self) -> None:
        for number, (peer, deadline_s) in list(self._connecting.items()):
            error = peer.error
            if error is None and not peer.ready:
                if self.clock() < deadline_s:
                    continue
                error = TransferError(f"the first read from {peer} does not end", FailureKind.TIMEOUT)
            del self._connecting[number]
            self.publish(orders.ConnectResult(number, error))
