"""The transfer thread: moves KV while the engine computes, however long a forward pass takes.

    engine core                        transfer thread
      pull, meet, ... ── mailbox ──►     sleeps in a poll on orders and sockets
      news ◄──────────── mailbox ──      one round of `exchange`, then sleeps again

Who makes one must `close` it, or what was promised to leases is not told. A daemon all the same: a transport that hangs
must not keep a process that has crashed from ending.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import zmq

from motet.errors import ConfigError, EngineError
from motet.transfer.base import News, PullOrder, Transport
from motet.transfer.channel import Welcome
from motet.transfer.cluster_key import ClusterKey
from motet.transfer.door import Door, listen
from motet.transfer.exchange import Exchange, ExchangeTerms
from motet.transfer.layout import KVFacts, Memory
from motet.transfer.line import LINGER_MS, Lines
from motet.transfer.mailbox import Mailbox
from motet.transfer.orders import Abandon, Expect, Fetch, GiveBack, Hold, Meet, Order
from motet.transfer.peer import Caller
from motet.transfer.peers import Peers
from motet.transfer.ticket import Ticket, TransferAddress

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""A worker whose side channel is silent for so long is not there."""
CLOSE_S = 5.0
"""How long the thread may take to end."""


@dataclass(frozen=True)
class TransferSettings:
    host: str
    """At which other workers reach this one; bound, and written into tickets."""
    port: int
    """0: a free one."""
    cluster_key: str
    pull_timeout_s: float
    engine_id: str
    """New at every start."""


class TransferThread:
    """`base.Transfers` over a transport and the side channel."""

    def __init__(
        self, settings: TransferSettings, facts: KVFacts, memory: Memory, make_transport: Callable[[], Transport]
    ) -> None:
        """ConfigError for an address that cannot be bound; raises what `make_transport`, called in the thread, does."""
        self.rounds = 0
        """How often the thread has woken up."""
        self._settings = settings
        self._key = ClusterKey(settings.cluster_key)
        self._facts = facts
        self._memory = memory
        self._make_transport = make_transport
        self._stopping = False
        self._closed = False
        self._crash: Exception | None = None
        self._leases = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._listening, host, port = listen(self._context, settings.host, settings.port)
        except ConfigError:
            self._context.term()
            raise
        self._address = TransferAddress(settings.engine_id, host, port)
        self._orders: Mailbox[Order] = Mailbox()
        self._news: Mailbox[News] = Mailbox()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="transfer", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> TransferAddress:
        return self._address

    def sealed(self, ticket: Ticket) -> Ticket:
        return self._key.sealed(ticket)

    def believes(self, ticket: Ticket) -> bool:
        return self._key.believes(ticket)

    def expect(self, ticket: Ticket) -> None:
        self._orders.put(Expect(ticket))

    def pull(self, order: PullOrder) -> None:
        self._orders.put(Fetch(order, time.monotonic()))

    def abandon(self, number: int) -> None:
        self._orders.put(Abandon(number))

    def release(self, ticket: Ticket) -> None:
        self._orders.put(GiveBack(ticket))

    def meet(self, number: int, address: TransferAddress) -> None:
        self._orders.put(Meet(number, address))

    def holding(self, leases: int) -> None:
        if leases != self._leases:
            self._leases = leases
            self._orders.put(Hold(leases))

    def fileno(self) -> int:
        return self._news.fileno()

    def news(self) -> list[News]:
        """Raises EngineError when the thread has crashed: nothing can be handed over any more."""
        if self._crash is not None:
            raise EngineError(f"the transfer thread has crashed: {self._crash!r}") from self._crash
        return self._news.take()

    def close(self) -> None:
        """Ends the thread; open pulls are in `news` as CLOSED then. Twice changes nothing."""
        if self._closed:
            return
        self._closed = True
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
            exchange = self._exchange(poller, self._make_transport())
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
                self._context.destroy(linger=LINGER_MS)

    def _loop(self, poller: zmq.Poller, exchange: Exchange) -> None:
        patience_ms: int | None = 0
        while not self._stopping:
            poller.poll(patience_ms)
            self.rounds += 1
            self._obey(exchange)
            patience_ms = exchange.round()
        self._obey(exchange)  # what was ordered before the end must have its ending too

    def _obey(self, exchange: Exchange) -> None:
        for order in self._orders.take():
            exchange.obey(order)

    def _exchange(self, poller: zmq.Poller, transport: Transport) -> Exchange:
        settings = self._settings
        answer_s = min(ANSWER_S, settings.pull_timeout_s)
        welcome = Welcome(settings.engine_id, transport.describe(), self._memory)
        caller = Caller(self._facts, answer_s, time.monotonic)
        poller.register(self._orders.fileno(), zmq.POLLIN)
        poller.register(self._listening, zmq.POLLIN)
        return Exchange(
            ExchangeTerms(settings.engine_id, settings.pull_timeout_s, answer_s),
            Door(self._listening, self._key, self._facts, welcome),
            Peers(Lines(self._context, poller, self._key), caller, transport),
            transport,
            tell=self._news.put,
            clock=time.monotonic,
        )
