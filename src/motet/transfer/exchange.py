"""All that the transfer thread does, one round at a time: obey orders, answer at the door, drive peers and pulls.

    order ──► Pull ──► news          as a reader: see `pull`
    door  ──► news                   as the owner of leases: who waits, who is done

`round` never blocks, and says how long the thread may sleep: a millisecond while reads of ours or of others are open or
may begin, for ever when there is nothing to do.
"""

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from motet.transfer import channel
from motet.transfer.base import (
    Failed,
    FailureKind,
    Met,
    News,
    PullOrder,
    ReaderDone,
    Settled,
    TransferError,
    Transport,
)
from motet.transfer.channel import Unreadable
from motet.transfer.door import Door
from motet.transfer.heartbeats import Heartbeats
from motet.transfer.orders import Abandon, Expect, Fetch, GiveBack, Hold, Meet, Order
from motet.transfer.peer import Peer
from motet.transfer.peers import Peers
from motet.transfer.pull import Pull, PullTerms
from motet.transfer.ticket import TransferAddress

logger = logging.getLogger(__name__)

ATTEND_FOR_S = 2.0
"""How long readers are polled for after one has come to the door: the first read is what wires a connection."""
LINGER_S = 0.02
"""How long the transport is driven on after a pull: what was sent last may not have left yet."""
BRISK_MS = 1


@dataclass(frozen=True)
class Meeting:
    """A peer that somebody waits for."""

    number: int
    peer: Peer
    due_s: float


@dataclass(frozen=True)
class ExchangeTerms:
    engine_id: str
    pull_timeout_s: float
    answer_s: float


class Exchange:
    """Owned by one thread."""

    def __init__(
        self,
        terms: ExchangeTerms,
        door: Door,
        peers: Peers,
        transport: Transport,
        *,
        tell: Callable[[News], None],
        clock: Callable[[], float],
    ) -> None:
        self._terms = terms
        self._door = door
        self._peers = peers
        self._transport = transport
        self._tell = tell
        self._clock = clock
        self._heartbeats = Heartbeats(clock)
        self._pulls: dict[int, Pull] = {}
        self._meetings: list[Meeting] = []
        self._leases = 0
        self._attend_until_s = -math.inf
        self._given_back = 0

    def obey(self, order: Order) -> None:
        match order:
            case Expect(ticket):
                self._heartbeats.begin(ticket)
            case Fetch(pull_order, ordered_s):
                self._heartbeats.end(pull_order.ticket)
                self._begin(pull_order, ordered_s)
            case Abandon(number):
                if pull := self._pulls.get(number):
                    self._report(pull, pull.abandon())
            case GiveBack(ticket):
                self._heartbeats.end(ticket)
                with contextlib.suppress(TransferError):
                    self._release(ticket.address, ticket.lease_id)
            case Meet(number, address):
                self._meet(number, address)
            case Hold(leases):
                self._leases = leases

    def round(self) -> int | None:
        """One look at everything; how many milliseconds may pass until the next, None for any number."""
        self._open_door()
        self._beat()
        self._peers.advance()
        for pull in list(self._pulls.values()):
            self._report(pull, pull.advance())
        self._look_at_meetings()
        brisk = self._brisk
        if brisk:
            self._attend()
        return BRISK_MS if brisk else self._patience_ms()

    def close(self) -> None:
        """Ends every pull; tells every lease that can still be told."""
        for pull in list(self._pulls.values()):
            self._report(pull, pull.close())
        for lease in self._heartbeats.end_all():
            with contextlib.suppress(TransferError):
                self._release(lease.address, lease.lease_id)
        for meeting in self._meetings:
            self._tell(Met(meeting.number, TransferError("this worker stops", FailureKind.CLOSED)))
        self._peers.close()
        self._door.close()
        self._transport.close()
        for number in self._pulls:
            self._tell(Settled(number))  # now that nothing writes any more

    @property
    def _brisk(self) -> bool:
        """Whether reads, ours or others', may be open: without a poll they do not go on."""
        return (
            self._leases > 0
            or bool(self._pulls)
            or bool(self._meetings)
            or self._peers.busy
            or self._clock() < self._attend_until_s
        )

    def _patience_ms(self) -> int | None:
        next_s = self._heartbeats.next_s
        return None if next_s is None else max(0, math.ceil((next_s - self._clock()) * 1000))

    def _open_door(self) -> None:
        visits = self._door.visits()
        if visits.welcome:
            self._attend_for(ATTEND_FOR_S)
        for news in visits.news:
            self._tell(news)

    def _attend(self) -> None:
        """Drives the reads of others, and hears which of them are done."""
        for body in self._transport.poll():
            with contextlib.suppress(Unreadable):
                done = channel.release_in(body)
                self._tell(ReaderDone(done.lease_id, done.reader))

    def _attend_for(self, seconds: float) -> None:
        self._attend_until_s = max(self._attend_until_s, self._clock() + seconds)

    def _beat(self) -> None:
        for lease in self._heartbeats.due():
            with contextlib.suppress(TransferError):
                self._peers.at(lease.address).waits(lease.lease_id)

    def _begin(self, order: PullOrder, ordered_s: float) -> None:
        try:
            peer = self._peers.at(order.ticket.address)
        except TransferError as error:
            self._tell(Failed(order.number, error.kind, error.message, settled=True))
            return
        reader = f"{self._terms.engine_id}:{order.number}"
        terms = PullTerms(reader, ordered_s, self._terms.pull_timeout_s)
        self._pulls[order.number] = Pull(order, peer, terms, self._clock)

    def _release(self, address: TransferAddress, lease_id: int) -> None:
        self._given_back += 1
        self._peers.at(address).release(lease_id, f"{self._terms.engine_id}:without-{self._given_back}")

    def _report(self, pull: Pull, news: News | None) -> None:
        if pull.over:
            del self._pulls[pull.order.number]
            self._attend_for(LINGER_S)
        if news is not None:
            logger.debug("pull for %s: %s", pull.order.label, news)
            self._tell(news)

    def _meet(self, number: int, address: TransferAddress) -> None:
        try:
            peer = self._peers.at(address)
        except TransferError as error:
            self._tell(Met(number, error))
            return
        if peer.ready:
            peer.ask()  # it may have died since
        self._meetings.append(Meeting(number, peer, self._clock() + self._terms.answer_s + ATTEND_FOR_S))

    def _look_at_meetings(self) -> None:
        waiting = []
        for meeting in self._meetings:
            if meeting.peer.error is not None or meeting.peer.ready:
                self._tell(Met(meeting.number, meeting.peer.error))
            elif self._clock() >= meeting.due_s:
                late = TransferError(f"the first read from {meeting.peer} does not end", FailureKind.TIMEOUT)
                self._tell(Met(meeting.number, late))
            else:
                waiting.append(meeting)
        self._meetings = waiting
