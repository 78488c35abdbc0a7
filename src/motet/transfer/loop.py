"""The work of the transfer thread, one round at a time.

1. `follow` is called for each order that has come from the engine core.
2. `run_round` reads the messages of the side channel, and advances everything that this worker reads (`reader`).
3. It polls the transport while a read by this worker or from it can be open, because reads do not advance without
   polling, and when the transport has received something.
4. It returns the number of milliseconds for which the thread can sleep."""

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from motet.transfer import orders, side_channel
from motet.transfer.orders import FailureKind, TransferError, TransferEvent
from motet.transfer.reader import TrunkReader
from motet.transfer.transport import Transport

logger = logging.getLogger(__name__)

POLL_AFTER_MESSAGE_S = 2.0
"""Time in seconds of polling after a message of a reader: its first read, which sets up a connection, can follow."""
POLL_MS = 1
"""Interval in milliseconds of rounds in which the transport is polled."""
DEREGISTER_TIMEOUT_S = 2.0
"""Time in seconds after which deregistering fails if reads into the memory still run."""


@dataclass(eq=False, kw_only=True)
class TransferLoop:
    """Follows orders, answers readers, and polls the transport. Owned by the transfer thread; never blocks. Orders,
    messages and peers have contents from other processes. If one of them causes an unexpected error, only this order,
    message or peer ends, and the traceback is logged."""

    reader: TrunkReader
    listener: side_channel.SideChannelListener
    transport: Transport
    publish: Callable[[TransferEvent], None]
    clock: Callable[[], float]
    _deregistering: list[tuple[orders.DeregisterMemory, float]] = field(init=False, default_factory=list)
    """Orders that wait for reads to end, each with its deadline."""
    _num_leases: int = field(init=False, default=0)
    _poll_until_s: float = field(init=False, default=-math.inf)

    def follow(self, order: orders.Order, ordered_s: float) -> None:
        """Follows an order that was given at `ordered_s` by the clock."""
        try:
            if isinstance(order, orders.OwnerOrder):
                self._follow(order)
            else:
                self.reader.follow(order, ordered_s)
        except TransferError as error:
            self._reject(order, error)
        except Exception as error:
            logger.exception("the transfer thread cannot follow an order: %s", type(order).__name__)
            self._reject(order, TransferError(f"the order cannot be followed: {error!r}", FailureKind.REFUSED))

    def run_round(self) -> int | None:
        """Returns the milliseconds until the next round must start; None if it can wait for an event."""
        if self.listener.receive(self.publish):
            self._poll_until_s = self.clock() + POLL_AFTER_MESSAGE_S
        self.reader.advance()
        self._deregister()
        is_owner = self._num_leases or self._deregistering or self.clock() < self._poll_until_s
        if is_owner or self.reader.needs_polling:
            self._poll_transport()
            return POLL_MS
        if self.transport.has_arrivals():
            self._poll_transport()
        next_s = self.reader.next_heartbeat_s
        return None if next_s is None else max(0, math.ceil((next_s - self.clock()) * 1000))

    def close(self) -> None:
        """Ends everything. Afterwards all pulls are settled."""
        self.reader.close()
        for order, _ in self._deregistering:
            order.done.set_result(False)
        self.listener.close()
        self.transport.close()
        self.reader.settle_all()

    def _follow(self, order: orders.OwnerOrder) -> None:
        match order:
            case orders.LeasesHeld(num_leases):
                self._num_leases = num_leases
            case orders.DeregisterMemory():
                self._deregistering.append((order, self.clock() + DEREGISTER_TIMEOUT_S))
            case orders.RegisterMemory(done):
                self.transport.register_blocks()
                description = self.transport.describe()
                self.listener.welcome = msgspec.structs.replace(self.listener.welcome, description=description)
                done.set_result(None)

    def _reject(self, order: orders.Order, error: TransferError) -> None:
        """Reports that an order cannot be followed. No read was posted for it."""
        if isinstance(order, orders.PullOrder):
            self.publish(orders.PullFailed(order.number, error.kind, error.message, settled=True))
        elif isinstance(order, orders.ConnectWorker):
            self.publish(orders.ConnectResult(order.number, error))
        elif isinstance(order, orders.RegisterMemory):
            order.done.set_exception(error)

    def _poll_transport(self) -> None:
        """Advances the reads of other workers, and publishes their messages about reads that are done."""
        for body in self.transport.poll():
            with contextlib.suppress(side_channel.MalformedMessageError):
                self.publish(side_channel.read(side_channel.NOTIFICATIONS, body))

    def _deregister(self) -> None:
        waiting, self._deregistering = self._deregistering, []
        for order, deadline_s in waiting:
            if (done := self.transport.deregister_blocks()) or self.clock() >= deadline_s:
                order.done.set_result(done)
            else:
                self._deregistering.append((order, deadline_s))
