"""Follows the block events of one worker, and notices missed ones.

    follow_blocks    follows one worker, from the first connection to the end
    Follower         decides by a message's number what is applied, and what is requested again
    Subscription     the sockets: messages, new connections, replays

Messages are numbered. The number of a published message decides what happens:

    the next one                     it is applied
    below the next one               it was in a replay already
    above it                         some were missed: they are requested
    not above the last published     the worker was started again: everything from the beginning is requested

A new connection may also mean a new process, so everything is requested then. A follower that hears nothing for a while
asks if it missed the last message. Messages that nobody has any more are given up: the worker then gets fewer groups
than it could, until new events have repaired the picture.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from motet.errors import ConfigError
from motet.kv_events import event_schema as schema
from motet.kv_events.changes import BlockChange, BlockListener, Cleared

logger = logging.getLogger(__name__)

SILENCE_S = 10.0
"""After this many seconds without a message a follower asks if it missed the last one."""
REPLAY_TIMEOUT_S = 5.0
MESSAGES_QUEUED = 10_000
"""Most messages queued while the follower is busy; further ones are dropped, which their numbers show."""
MESSAGES_REPLAYED = 100_000
"""Most messages of a replay that are queued. vLLM drops messages when its own queue is full, so ours must be long."""
MOST_BYTES = 2**26
"""Most bytes of a message, enough for half a million blocks; a publisher that sends a larger one is disconnected."""
MOST_REPLAYED_BYTES = 2**27
"""Most bytes of a replay."""
QUIET_S = 1.0
"""If nothing more of a replay comes for this many seconds, the rest of it was dropped."""
REDIAL_MS = 100
REDIAL_MOST_MS = 5_000


@dataclass(frozen=True)
class BlockSource:
    """The endpoints of a worker's block events."""

    endpoint: str
    replay: str | None
    """Endpoint of replays; None if the worker has none."""

    @classmethod
    def ours(cls, endpoint: str) -> "BlockSource":
        """Returns the source for one of our servers. Raises ConfigError unless it is `tcp://HOST:PORT`."""
        return cls(endpoint, schema.replay_endpoint(endpoint))


async def follow_blocks(source: BlockSource, listener: BlockListener, *, shared: "SharedContext | None" = None) -> None:
    """Tells `listener` of a worker's blocks until it is cancelled, even before a worker is there. Returns at once, with
    a warning, if the source cannot be an address. `shared`: the context of those who follow other workers."""
    try:
        subscription = Subscription(source, shared)
    except ConfigError as exc:
        logger.warning("%s", exc)
        return
    try:
        await Follower(subscription, listener, name=source.endpoint).run()
    finally:
        subscription.close()


@dataclass(frozen=True)
class NumberedMessage:
    number: int
    payload: bytes


class SubscriptionEvent(Enum):
    """The events of a subscription beside messages."""

    JOINED = "joined"
    """A connection was made: the first one, or a new one, maybe to another process."""
    SILENCE = "silence"
    GARBLED = "garbled"


@dataclass(frozen=True)
class Replayed:
    messages: list[NumberedMessage]
    whole: bool
    """True if its end came."""


class ReplayError(Exception):
    """The missed messages are not available."""


class Follower:
    """Follows one worker. The listener gets Cleared whenever earlier changes may not be true any more."""

    def __init__(
        self, subscription: "Subscription", listener: BlockListener, *, name: str, silence_s: float = SILENCE_S
    ) -> None:
        """`name`: names the worker in the log."""
        self._subscription = subscription
        self._listener = listener
        self._name = name
        self._silence_s = silence_s
        self._reader = schema.EventReader()
        self._next: int | None = None
        """Number of the message that should come next; None if it may be any."""
        self._whole = True
        """False if messages from the first one on were requested and did not come: they are requested again."""
        self._published: int | None = None
        """Number of the last message that was published, not replayed."""
        self._said: set[str] = set()

    async def run(self) -> None:
        """Follows until it is cancelled."""
        while True:
            match await self._subscription.hear(self._silence_s):
                case SubscriptionEvent.JOINED:
                    self._published = None
                    await self._start_over()
                case NumberedMessage() as message:
                    await self._take(message)
                case SubscriptionEvent.GARBLED:
                    self._say_once("one of its messages is garbled")  # the next one's number shows what is missing
                case SubscriptionEvent.SILENCE:
                    await self._catch_up()

    async def _take(self, message: NumberedMessage) -> None:
        """Applies what its number allows to be applied."""
        if self._published is not None and message.number <= self._published:
            await self._start_over()
        self._published = message.number
        if self._is_early(message):
            await self._catch_up()
        if self._is_early(message):
            self._say_once("missed messages are not available any more")
            self._tell([self._forgotten()])
            self._next = None
        if self._next in (None, message.number):
            self._next = message.number + 1
            self._tell(self._changes_in([message]))

    def _is_early(self, message: NumberedMessage) -> bool:
        """Returns True if messages before it were missed."""
        return self._next is not None and message.number > self._next

    async def _start_over(self) -> None:
        """Begins again from the first message that is still available."""
        changes: list[BlockChange] = [self._forgotten()]
        messages = await self._replay(0)
        self._whole = messages is not None
        if messages is None:
            self._next = None
        else:
            self._next = messages[-1].number + 1 if messages else 0
            changes += self._changes_in(messages)
        self._tell(changes)

    async def _catch_up(self) -> None:
        """Takes the messages since the last one, as far as they are available."""
        start = self._next if self._whole else 0
        if start is None or not (messages := await self._replay(start)):
            return
        changes: list[BlockChange] = [] if messages[0].number == self._next else [self._forgotten()]
        self._next, self._whole = messages[-1].number + 1, True
        self._tell(changes + self._changes_in(messages))

    async def _replay(self, start: int) -> list[NumberedMessage] | None:
        """Returns the messages from number `start` on, or from a later one if they begin there, without a gap; None if
        they are not available. Messages that were dropped from a long replay are requested again."""
        messages: list[NumberedMessage] = []
        while sum(len(message.payload) for message in messages) <= MOST_REPLAYED_BYTES:
            try:
                replay = await self._subscription.replay(start, patience_s=REPLAY_TIMEOUT_S)
            except ReplayError as exc:
                self._say_once(str(exc))
                return messages or None
            if messages and replay.messages and replay.messages[0].number != start:
                return messages
            unbroken = _unbroken(replay.messages)
            messages += unbroken
            if not unbroken or (replay.whole and len(unbroken) == len(replay.messages)):
                return messages
            start = unbroken[-1].number + 1
        self._say_once(f"its replay has more than {MOST_REPLAYED_BYTES} bytes")
        return messages

    def _changes_in(self, messages: Sequence[NumberedMessage]) -> list[BlockChange]:
        """Reads changes. After an event that cannot be understood nothing is known, since it may have been anything."""
        changes: list[BlockChange] = []
        for message in messages:
            try:
                for event in schema.events_in(message.payload):
                    changes += self._not_understood() if event is None else self._reader.changes(event)
            except schema.UNREADABLE:
                changes += self._not_understood()
        return changes

    def _not_understood(self) -> list[BlockChange]:
        self._say_once("its events cannot be understood")
        return [self._forgotten()]

    def _forgotten(self) -> Cleared:
        self._reader.forget()
        return Cleared()

    def _tell(self, changes: Sequence[BlockChange]) -> None:
        if changes:
            self._listener(changes)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("block events of %s: %s", self._name, what)


def _unbroken(messages: list[NumberedMessage]) -> list[NumberedMessage]:
    """Returns the messages before the first gap."""
    first = messages[0].number if messages else 0
    return [message for index, message in enumerate(messages) if message.number == first + index]


class Subscription:
    """Owns its sockets; ZeroMQ redials by itself. All topics of the endpoint are taken."""

    def __init__(self, source: BlockSource, shared: "SharedContext | None" = None) -> None:
        """`shared`: the context of other subscriptions. Raises ConfigError if it cannot be an endpoint."""
        self._source = source
        shared = shared or SharedContext()
        with contextlib.ExitStack() as undo:
            self._context = shared.take()
            undo.callback(shared.give_back)
            self._events = self._context.socket(zmq.SUB)
            undo.callback(self._events.close, linger=0)
            self._events.setsockopt(zmq.RCVHWM, MESSAGES_QUEUED)
            self._events.setsockopt(zmq.RECONNECT_IVL, REDIAL_MS)
            self._events.setsockopt(zmq.RECONNECT_IVL_MAX, REDIAL_MOST_MS)
            self._events.setsockopt(zmq.SUBSCRIBE, b"")
            self._connections = self._events.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
            undo.callback(self._connections.close, linger=0)
            undo.callback(self._events.disable_monitor)
            self._connect(self._events, source.endpoint)
            self._closing = undo.pop_all()
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._events, zmq.POLLIN)  # first: a connection is heard of before its messages
        self._poller.register(self._connections, zmq.POLLIN)

    async def hear(self, patience_s: float) -> NumberedMessage | SubscriptionEvent:
        """Returns the next message or event; the event of a new connection comes before the messages through it."""
        ready = dict(await self._poller.poll(round(patience_s * 1000)))
        if self._connections in ready:
            parse_monitor_message(await self._connections.recv_multipart())
            return SubscriptionEvent.JOINED
        if self._events in ready:
            return _message(await self._events.recv_multipart()) or SubscriptionEvent.GARBLED
        return SubscriptionEvent.SILENCE

    async def replay(self, start: int, *, patience_s: float, quiet_s: float = QUIET_S) -> Replayed:
        """Asks for the messages from number `start` on. Raises ReplayError, also after `patience_s` of silence."""
        if self._source.replay is None:
            raise ReplayError("it does not replay")
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, MESSAGES_REPLAYED)
        messages: list[NumberedMessage] = []
        num_bytes = 0
        try:
            self._connect(socket, self._source.replay)
            await socket.send_multipart([b"", schema.number_bytes(start)])
            while True:
                # Not wait_for, which before Python 3.12 swallows a cancellation that comes with the answer.
                async with asyncio.timeout(quiet_s if messages else patience_s):
                    frames = await socket.recv_multipart()
                if schema.END in frames[-2:-1]:
                    return Replayed(messages, whole=True)
                if (message := _message(frames)) is None:
                    raise ReplayError("its replay means nothing")
                messages.append(message)
                if (num_bytes := num_bytes + len(message.payload)) > MOST_REPLAYED_BYTES:
                    return Replayed(messages, whole=False)
        except TimeoutError as exc:
            if messages:
                return Replayed(messages, whole=False)
            raise ReplayError(f"its replay did not come in {patience_s:g} s") from exc
        except ConfigError as exc:
            raise ReplayError(str(exc)) from exc
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        self._closing.close()

    @staticmethod
    def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as exc:
            raise ConfigError(f"block events: {endpoint!r} is not an endpoint: {exc}") from exc


def _message(frames: list[bytes]) -> NumberedMessage | None:
    """Reads [topic, number, payload]; a replay has an empty frame before, and may lack the topic."""
    if len(frames) < 2 or len(frames[-2]) != schema.NUMBER_BYTES:
        return None
    return NumberedMessage(schema.number_in(frames[-2]), frames[-1])


class SharedContext:
    """One ZeroMQ context for all subscriptions of an event loop, there from when the first takes it until the last has
    given it back. With one context each, followers would have two threads and eight open files for every worker."""

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None
        self._takers = 0

    def take(self) -> zmq.asyncio.Context:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._takers += 1
        return self._context

    def give_back(self) -> None:
        """Called by a taker that has closed its sockets."""
        self._takers -= 1
        if self._takers == 0 and self._context is not None:
            context, self._context = self._context, None
            with contextlib.suppress(zmq.ZMQError):
                context.term()
