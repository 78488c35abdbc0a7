"""The transfer thread: it moves KV while the engine computes, however long a forward pass takes.

    engine core                        transfer thread
      order ──────────── mailbox ──►     waits in a poll for orders and sockets
      event ◄─────────── mailbox ──      runs one round of `TransferLoop`, then waits again

    order    ──► TrunkReader ──► event      as the reader of trunks of other workers
    listener ──► event                      as the owner of leases: heartbeats of readers, readers that are done

1. The constructor binds the side channel, starts the thread, and returns when the transport has started.
2. The engine gives orders and takes events; the thread runs until `close`.
3. `close` ends the thread; no bytes can arrive in the memory afterwards. Without `close`, leases of other workers are
   not released. The thread is still a daemon: a transport that hangs must not keep a crashed process alive.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq

from motet.errors import ConfigError, EngineError
from motet.transfer import orders, side_channel
from motet.transfer.loop import DEREGISTER_TIMEOUT_S, TransferLoop
from motet.transfer.mailbox import Mailbox
from motet.transfer.peer import Peers, ReaderTerms
from motet.transfer.reader import TrunkReader
from motet.transfer.ticket import ClusterKey, TransferAddress, TransportKind
from motet.transfer.transport import KVFacts, RegisteredMemory, Transport

logger = logging.getLogger(__name__)

MakeTransport = Callable[[zmq.Poller], Transport]
"""Makes the transport. A transport can register sockets with the poller, so that the thread wakes for its peers."""

ANSWER_TIMEOUT_S = 5.0
"""Time in seconds after which a worker whose side channel is silent counts as unreachable."""
CLOSE_TIMEOUT_S = 5.0
"""Time in seconds for which `close` waits for the thread to end."""


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    host: str
    """Address at which other workers reach this one. It is bound, and is part of tickets."""
    port: int
    """Port of the side channel; 0 means any free port."""
    cluster_key: str
    pull_timeout_s: float
    engine_id: str


class TransferThread:
    """The engine's interface to transfers. Only `deregister_memory`, `register_memory` and `close` can block."""

    def __init__(
        self,
        settings: TransferSettings,
        facts: KVFacts,
        *,
        memory: RegisteredMemory,
        make_transport: MakeTransport,
    ) -> None:
        """Calls `make_transport` in the thread. Raises its errors, or ConfigError if the address cannot be bound."""
        self.key = ClusterKey(settings.cluster_key)
        """Seals this worker's tickets, and checks the tickets of other workers."""
        self._settings = settings
        self._facts = facts
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
        self._events: Mailbox[orders.TransferEvent] = Mailbox()
        started: Future[TransportKind] = Future()
        run = partial(self._run, make_transport, memory, started=started)
        self._thread = threading.Thread(target=run, name="transfer", daemon=True)
        self._thread.start()
        try:
            self.kind = started.result()
        except BaseException:
            self.close()
            raise

    def order(self, order: orders.Order) -> None:
        self._orders.put((order, time.monotonic()))

    def take_events(self) -> list[orders.TransferEvent]:
        """Returns the events since the last call. Raises EngineError if the thread has crashed."""
        if self._crash is not None:
            raise EngineError(f"the transfer thread has crashed: {self._crash!r}") from self._crash
        return self._events.take()

    def fileno(self) -> int:
        """Returns a file descriptor that is readable while there are events."""
        return self._events.fileno()

    def deregister_memory(self) -> bool:
        """Orders `DeregisterMemory`, and returns its result. No pull may be ordered until `register_memory`."""
        order = orders.DeregisterMemory(Future())
        self.order(order)
        return order.done.result(DEREGISTER_TIMEOUT_S + CLOSE_TIMEOUT_S)

    def register_memory(self) -> None:
        """Orders `RegisterMemory`. Raises TransferError if the memory cannot be registered."""
        order = orders.RegisterMemory(Future())
        self.order(order)
        order.done.result(CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Ends the thread. Afterwards no bytes can arrive in the memory, and `take_events` returns the ends of open
        pulls. A second call changes nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._orders.wake()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the transfer thread does not end")
            return
        self._orders.close()
        self._events.close()

    def _run(
        self, make_transport: MakeTransport, memory: RegisteredMemory, *, started: "Future[TransportKind]"
    ) -> None:
        try:
            poller = zmq.Poller()
            loop = self._make_loop(poller, make_transport(poller), memory=memory)
        except Exception as error:
            self._context.destroy(linger=0)
            started.set_exception(error)
            return
        started.set_result(loop.transport.kind)
        try:
            self._run_rounds(poller, loop)
        except Exception as error:
            logger.exception("the transfer thread has crashed")
            self._crash = error
            self._events.wake()
        finally:
            try:
                loop.close()
            finally:
                self._context.destroy(linger=side_channel.LINGER_MS)

    def _run_rounds(self, poller: zmq.Poller, loop: TransferLoop) -> None:
        wait_ms: int | None = 0
        stopping = False
        while not stopping:
            poller.poll(wait_ms)
            stopping = self._stopping
            for order, ordered_s in self._orders.take():  # even when stopping: each order must end in an event
                loop.follow(order, ordered_s)
            wait_ms = 0 if stopping else loop.run_round()

    def _make_loop(self, poller: zmq.Poller, transport: Transport, *, memory: RegisteredMemory) -> TransferLoop:
        settings, facts = self._settings, msgspec.structs.replace(self._facts, transport=transport.kind)
        welcome = side_channel.Welcome(settings.engine_id, transport.describe(), memory)
        poller.register(self._orders.fileno(), zmq.POLLIN)
        poller.register(self._listening, zmq.POLLIN)
        peers = Peers(
            lambda address: side_channel.SideChannelClient(address, self._context, poller=poller, key=self.key),
            ReaderTerms(facts, min(ANSWER_TIMEOUT_S, settings.pull_timeout_s), time.monotonic),
            transport,
        )
        reader = TrunkReader(
            engine_id=settings.engine_id,
            peers=peers,
            pull_timeout_s=settings.pull_timeout_s,
            publish=self._events.put,
            clock=time.monotonic,
        )
        return TransferLoop(
            reader=reader,
            listener=side_channel.SideChannelListener(self._listening, self.key, facts, welcome),
            transport=transport,
            publish=self._events.put,
            clock=time.monotonic,
        )
