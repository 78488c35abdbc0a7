"""The transfer thread: it moves KV while the engine computes, however long a forward pass takes.

    engine core                        transfer thread
      order ──────────── mailbox ──►     sleeps in a poll on orders and sockets
      news ◄──────────── mailbox ──      one round of `Exchange`, then sleeps again

    order    ──► Pull ──► news           as a reader: see `pull`
    listener ──► news                    as the owner of leases: readers that wait, readers that are done

The maker of a `TransferThread` must close it, or leases do not get their last messages. The thread is still a daemon: a
transport that hangs must not keep a process that has crashed from ending.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import zmq

from motet.errors import ConfigError, EngineError
from motet.transfer import orders, side_channel
from motet.transfer.lease import Heartbeats
from motet.transfer.mailbox import Mailbox
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.peer import Peer, Peers, ReaderTerms
from motet.transfer.pull import Pull
from motet.transfer.ticket import ClusterKey, Ticket, TransferAddress
from motet.transfer.transport import KVFacts, RegisteredMemory, Transport

logger = logging.getLogger(__name__)

ATTEND_FOR_S = 2.0
"""Seconds of polling for readers after a message of one: its first read, which sets up a connection, may follow."""
LINGER_S = 0.02
"""Seconds for which the transport is polled after a pull, so that the last messages leave."""
BRISK_MS = 1
WITHDRAW_S = 2.0
"""Seconds for which reads may go on before the memory that they write into is not withdrawn."""
ANSWER_S = 5.0
"""A worker whose side channel is silent for this many seconds counts as unreachable."""
CLOSE_S = 5.0
"""Seconds that the thread may take to end."""


@dataclass(eq=False, kw_only=True)
class Exchange:
    """Does the work of the transfer thread, one round at a time: follows orders, answers readers, drives peers and
    pulls. Owned by one thread; never blocks.

    Orders, messages and peers have contents from outside. If one of them raises an unexpected error, that order or peer
    ends, with its traceback in the log, and the transfers of others go on."""

    engine_id: str
    listener: side_channel.SideChannelListener
    peers: Peers
    transport: Transport
    pull_timeout_s: float
    answer_s: float
    tell: Callable[[orders.News], None]
    clock: Callable[[], float]
    _pulls: dict[int, Pull] = field(init=False, default_factory=dict)
    _meetings: dict[int, tuple[Peer, float]] = field(init=False, default_factory=dict)
    """For each `MeetWorker` its peer, and the time until which it waits."""
    _broken: list[int] = field(init=False, default_factory=list)
    """Pulls that ended with an unexpected error: their reads may write until the transport is closed."""
    _withdrawing: list[tuple[orders.Withdraw, float]] = field(init=False, default_factory=list)
    """Each with the time until which it waits for reads."""
    _num_leases: int = field(init=False, default=0)
    _attend_until_s: float = field(init=False, default=-math.inf)
    _num_released: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._heartbeats = Heartbeats(self.clock)

    def obey(self, order: orders.Order, ordered_s: float) -> None:
        """Follows an order that was given at `ordered_s` by the clock."""
        try:
            self._obey(order, ordered_s)
        except TransferError as error:
            self._refuse(order, error)
        except Exception as error:
            logger.exception("the transfer thread cannot follow an order: %s", type(order).__name__)
            self._refuse(order, TransferError(f"the order cannot be followed: {error!r}", FailureKind.REFUSED))

    def round(self) -> int | None:
        """Looks at everything once. Returns the milliseconds until the next look is needed (None: no limit), which is
        one while reads of ours or of others are open or may begin."""
        if self.listener.receive(self.tell):
            self._attend_for(ATTEND_FOR_S)
        self._beat()
        self.peers.advance()
        for pull in list(self._pulls.values()):
            self._advance(pull)
        self._look_at_meetings()
        self._look_at_withdrawing()
        if self._brisk:
            self._attend()
            return BRISK_MS
        next_s = self._heartbeats.next_s
        return None if next_s is None else max(0, math.ceil((next_s - self.clock()) * 1000))

    def close(self) -> None:
        """Ends every pull, and tells every lease that can be reached."""
        for pull in list(self._pulls.values()):
            self._report(pull, pull.close())
        for ticket in self._heartbeats.end_all():
            with contextlib.suppress(TransferError):
                self._release(ticket)
        for withdraw, _ in self._withdrawing:
            withdraw.done.set_result(False)
        for number in self._meetings:
            self.tell(orders.Met(number, TransferError("this worker stops", FailureKind.CLOSED)))
        self.peers.close()
        self.listener.close()
        self.transport.close()
        for number in (*self._pulls, *self._broken):
            self.tell(orders.PullSettled(number))  # nothing writes any more

    def _obey(self, order: orders.Order, ordered_s: float) -> None:
        match order:
            case orders.KeepAlive(ticket):
                self._heartbeats.begin(ticket)
            case orders.PullOrder(number, ticket):
                self._heartbeats.end(ticket)
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
                    self._report(pull, pull.abandon())
            case orders.ReleaseTicket(ticket):
                self._heartbeats.end(ticket)
                self._release(ticket)
            case orders.MeetWorker(number, address):
                peer = self.peers.at(address)
                if peer.ready:
                    peer.ask()  # it may have died since
                self._meetings[number] = peer, self.clock() + self.answer_s + ATTEND_FOR_S
            case orders.LeasesHeld(num_leases):
                self._num_leases = num_leases
            case orders.Withdraw() | orders.AdvertiseMemory():
                self._obey_about_memory(order)

    def _obey_about_memory(self, order: orders.Withdraw | orders.AdvertiseMemory) -> None:
        if isinstance(order, orders.Withdraw):
            self._withdrawing.append((order, self.clock() + WITHDRAW_S))
            return
        self.transport.offer()
        description = self.transport.describe()
        self.listener.welcome = msgspec.structs.replace(self.listener.welcome, description=description)
        order.done.set_result(None)

    def _refuse(self, order: orders.Order, error: TransferError) -> None:
        """Ends an order that cannot be followed. No read was posted for it."""
        if isinstance(order, orders.PullOrder):
            self.tell(orders.PullFailed(order.number, error.kind, error.message, settled=True))
        elif isinstance(order, orders.MeetWorker):
            self.tell(orders.Met(order.number, error))
        elif isinstance(order, orders.AdvertiseMemory):
            order.done.set_exception(error)

    @property
    def _brisk(self) -> bool:
        """True if reads of ours or of others may be open: without polling they do not go on."""
        under_way = self._num_leases or self._pulls or self._meetings or self._withdrawing or self.peers.busy
        return bool(under_way) or self.clock() < self._attend_until_s

    def _attend(self) -> None:
        """Drives the reads of others, and takes notice of those that are done."""
        for body in self.transport.poll():
            with contextlib.suppress(side_channel.MalformedMessageError):
                self.tell(side_channel.read(side_channel.NOTIFICATIONS, body))

    def _attend_for(self, seconds: float) -> None:
        self._attend_until_s = max(self._attend_until_s, self.clock() + seconds)

    def _beat(self) -> None:
        for ticket in self._heartbeats.due():
            try:
                self.peers.at(ticket.address).waits(ticket.lease_id)
            except TransferError:
                pass  # the lease ends by itself
            except Exception:
                logger.exception("the worker at %s cannot be told that a reader waits", ticket.remote_host)

    def _release(self, ticket: Ticket) -> None:
        self._num_released += 1
        self.peers.at(ticket.address).release(ticket.lease_id, f"{self.engine_id}:without-{self._num_released}")

    def _advance(self, pull: Pull) -> None:
        told = pull.told
        try:
            self._report(pull, pull.advance())
        except Exception as error:
            logger.exception("the pull for %s cannot go on", pull.order.label)
            del self._pulls[pull.order.number]
            self._broken.append(pull.order.number)
            if not told:
                message = f"the pull from {pull.peer} failed: {error!r}"
                self.tell(orders.PullFailed(pull.order.number, FailureKind.PEER_LOST, message, settled=False))

    def _report(self, pull: Pull, news: orders.News | None) -> None:
        if pull.over:
            del self._pulls[pull.order.number]
            self._attend_for(LINGER_S)
        if news is not None:
            logger.debug("pull for %s: %s", pull.order.label, news)
            self.tell(news)

    def _look_at_meetings(self) -> None:
        for number, (peer, due_s) in list(self._meetings.items()):
            error = peer.error
            if error is None and not peer.ready:
                if self.clock() < due_s:
                    continue
                error = TransferError(f"the first read from {peer} does not end", FailureKind.TIMEOUT)
            del self._meetings[number]
            self.tell(orders.Met(number, error))

    def _look_at_withdrawing(self) -> None:
        waiting, self._withdrawing = self._withdrawing, []
        for withdraw, due_s in waiting:
            if (done := self.transport.withdraw()) or self.clock() >= due_s:
                withdraw.done.set_result(done)
            else:
                self._withdrawing.append((withdraw, due_s))


@dataclass(frozen=True)
class TransferSettings:
    host: str
    """The address at which other workers reach this one; it is bound, and written into tickets."""
    port: int
    """0: a free one."""
    cluster_key: str
    pull_timeout_s: float
    engine_id: str


class TransferThread:
    """The engine's interface to transfers. Every method returns at once, except `withdraw`, `offer` and `close`."""

    def __init__(
        self,
        settings: TransferSettings,
        facts: KVFacts,
        *,
        memory: RegisteredMemory,
        make_transport: Callable[[], Transport],
    ) -> None:
        """Raises ConfigError for an address that cannot be bound, and what `make_transport` raises in the thread."""
        self.key = ClusterKey(settings.cluster_key)
        """Seals our tickets, and checks those of others."""
        self._settings = settings
        self._facts = facts
        self._memory = memory
        self._make_transport = make_transport
        self._stopping = False
        self._crash: Exception | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._listening, host, port = side_channel.listen(settings.host, settings.port, context=self._context)
        except ConfigError:
            self._context.term()
            raise
        self.address = TransferAddress(settings.engine_id, host, port)
        self._orders: Mailbox[tuple[orders.Order, float]] = Mailbox()
        self._news: Mailbox[orders.News] = Mailbox()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="transfer", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.close()
            raise

    def order(self, order: orders.Order) -> None:
        self._orders.put((order, time.monotonic()))

    def news(self) -> list[orders.News]:
        """Takes the news since the last call. Raises EngineError when the thread has crashed."""
        if self._crash is not None:
            raise EngineError(f"the transfer thread has crashed: {self._crash!r}") from self._crash
        return self._news.take()

    def fileno(self) -> int:
        """Returns a file descriptor that is readable while there is news."""
        return self._news.fileno()

    def withdraw(self) -> bool:
        """Makes the memory unknown to the network, so that its pages can be given back. Returns False if a read may
        still write into it after a while. No pull may be ordered until `offer`."""
        withdraw = orders.Withdraw(Future())
        self.order(withdraw)
        return withdraw.done.result(WITHDRAW_S + CLOSE_S)

    def offer(self) -> None:
        """Makes the memory known again. Raises TransferError if it cannot."""
        offer = orders.AdvertiseMemory(Future())
        self.order(offer)
        offer.done.result(CLOSE_S)

    def close(self) -> None:
        """Ends the thread. Then nothing writes into the memory, and open pulls are in `news`. May be called twice."""
        if self._stopping:
            return
        self._stopping = True
        self._orders.ring()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.error("the transfer thread does not end")
            return
        self._orders.close()
        self._news.close()

    def _run(self, started: "Future[None]") -> None:
        try:
            poller = zmq.Poller()
            exchange = self._make_exchange(poller, self._make_transport())
        except Exception as error:
            self._context.destroy(linger=0)
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._loop(poller, exchange)
        except Exception as error:
            logger.exception("the transfer thread has crashed")
            self._crash = error
            self._news.ring()
        finally:
            try:
                exchange.close()
            finally:
                self._context.destroy(linger=side_channel.LINGER_MS)

    def _loop(self, poller: zmq.Poller, exchange: Exchange) -> None:
        patience_ms: int | None = 0
        stopping = False
        while not stopping:
            poller.poll(patience_ms)
            stopping = self._stopping
            for order, ordered_s in self._orders.take():  # also before the end: each order must end in news
                exchange.obey(order, ordered_s)
            patience_ms = 0 if stopping else exchange.round()

    def _make_exchange(self, poller: zmq.Poller, transport: Transport) -> Exchange:
        settings = self._settings
        answer_s = min(ANSWER_S, settings.pull_timeout_s)
        welcome = side_channel.Welcome(settings.engine_id, transport.describe(), self._memory)
        poller.register(self._orders.fileno(), zmq.POLLIN)
        poller.register(self._listening, zmq.POLLIN)
        return Exchange(
            engine_id=settings.engine_id,
            listener=side_channel.SideChannelListener(self._listening, self.key, self._facts, welcome),
            peers=Peers(
                lambda address: side_channel.SideChannelClient(address, self._context, poller=poller, key=self.key),
                ReaderTerms(self._facts, answer_s, time.monotonic),
                transport,
            ),
            transport=transport,
            pull_timeout_s=settings.pull_timeout_s,
            answer_s=answer_s,
            tell=self._news.put,
            clock=time.monotonic,
        )
