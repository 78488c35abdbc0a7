"""Follows the block events of one worker, and detects missed messages.

    follow_blocks    follows one worker, from the first connection to the end
    Follower         decides by a message's number what is applied, and what is requested again
    Subscription     the sockets: messages, new connections, replays

Messages are numbered. The number of a published message decides what happens:

    the expected next number         it is applied
    a lower number                   it was already part of a replay
    a higher number                  messages were missed: they are requested
    not above the last published     the worker has restarted: all messages from the first one on are requested

A new connection can also mean a new process, so all messages are requested then. A follower that receives nothing for
`SILENCE_S` checks whether it missed the last message. If messages are not available any more, the worker gets fewer
groups than possible until new events have made its blocks known again."""

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
REPLAY_TIMEOUT_S = 5.0
MESSAGES_QUEUED = 10_000
"""Maximum number of messages queued while the follower is busy. More are dropped, which the numbers show."""
MESSAGES_REPLAYED = 100_000
"""Maximum number of queued messages of a replay. It is high because vLLM drops messages when its own queue is full."""
MAX_MESSAGE_BYTES = 2**26
"""Maximum size of a message, enough for half a million blocks. A publisher that sends a larger one is disconnected."""
MAX_REPLAY_BYTES = 2**27
"""Maximum size of a replay."""
REPLAY_GAP_S = 1.0
"""Time in seconds without a message of a replay after which its other messages count as dropped."""
RECONNECT_MS = 100
MAX_RECONNECT_MS = 5_000


@dataclass(frozen=True)
class BlockSource:
    """The endpoints of a worker's block events."""

    endpoint: str
    replay: str | None
    """Endpoint for replays; None if the worker has none."""

    @classmethod
    def of_motet(cls, endpoint: str) -> "BlockSource":
        """Returns the source for a Motet server. Raises ConfigError unless the endpoint is `tcp://HOST:PORT`."""
        return cls(endpoint, schema.replay_endpoint(endpoint))


async def follow_blocks(source: BlockSource, listener: BlockListener, *, shared: "SharedContext | None" = None) -> None:
    """Passes the changes of a worker's blocks to `listener` until it is cancelled. The worker can start later. If the
    source is not a valid address, logs a warning and returns. `shared`: ZeroMQ context of all followers."""
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
    """A message of a publisher."""

    number: int
    payload: bytes


class SubscriptionEvent(Enum):
    """Events of a subscription other than messages."""

    JOINED = "joined"
    """A connection was made: the first one, or a new one, possibly to another process."""
    SILENCE = "silence"
    GARBLED = "garbled"


@dataclass(frozen=True)
class Replayed:
    messages: list[NumberedMessage]
    complete: bool
    """True if the end of the replay was received."""


class ReplayError(Exception):
    """The missed messages are not available."""


class Follower:
    """Follows one worker. The listener gets Cleared whenever earlier changes possibly do not hold any more."""

    def __init__(
        self, subscription: "Subscription", listener: BlockListener, *, name: str, silence_s: float = SILENCE_S
    ) -> None:
        """`name`: name of the worker in the log."""
        self._subscription = subscription
        self._listener = listener
        self._name = name
        self._silence_s = silence_s
        self._reader = schema.EventReader()
        self._next: int | None = None
        """Number of the expected next message; None if any message can be the next one."""
        self._complete = True
        """False if all messages were requested and not received: they are requested again."""
        self._published: int | None = None
        """Number of the last message that was published, not replayed."""
        self._warned: set[str] = set()

    async def run(self) -> None:
        while True:
            match await self._subscription.next(self._silence_s):
                case SubscriptionEvent.JOINED:
                    self._published = None
                    await self._start_over()
                case NumberedMessage() as message:
                    await self._apply(message)
                case SubscriptionEvent.GARBLED:  # the number of the next message shows that this one is missing
                    self._warn_once("one of its messages is malformed")
                case SubscriptionEvent.SILENCE:
                    await self._catch_up()

    async def _apply(self, message: NumberedMessage) -> None:
        """Applies messages that were missed before this one, and then this one, if their numbers permit it."""
        if self._published is not None and message.number <= self._published:
            await self._start_over()
        self._published = message.number
        if self._is_early(message):
            await self._catch_up()
        if self._is_early(message):
            self._warn_once("missed messages are not available any more")
            self._report([self._clear()])
            self._next = None
        if self._next in (None, message.number):
            self._next = message.number + 1
            self._report(self._changes_in([message]))

    def _is_early(self, message: NumberedMessage) -> bool:
        return self._next is not None and message.number > self._next

    async def _start_over(self) -> None:
        """Starts again with the first message that is still available."""
        cleared = self._clear()
        messages = await self._replay(0)
        self._complete = messages is not None
        self._next = None
        if messages is not None:
            self._next = messages[-1].number + 1 if messages else 0
        self._report([cleared, *self._changes_in(messages or [])])

    async def _catch_up(self) -> None:
        """Applies the messages since the last one, if they are available."""
        start = self._next if self._complete else 0
        if start is None or not (messages := await self._replay(start)):
            return
        changes: list[BlockChange] = [] if messages[0].number == self._next else [self._clear()]
        self._next, self._complete = messages[-1].number + 1, True
        self._report(changes + self._changes_in(messages))

    async def _replay(self, start: int) -> list[NumberedMessage] | None:
        """Returns the messages from number `start` on, or from a later one, without a gap. None if they are not
        available. Messages that were dropped from a long replay are requested again."""
        messages: list[NumberedMessage] = []
        while sum(len(message.payload) for message in messages) <= MAX_REPLAY_BYTES:
            try:
                replay = await self._subscription.replay(start, patience_s=REPLAY_TIMEOUT_S)
            except ReplayError as exc:
                self._warn_once(str(exc))
                return messages or None
            if messages and replay.messages and replay.messages[0].number != start:
                return messages
            unbroken = _unbroken(replay.messages)
            messages += unbroken
            if not unbroken or (replay.complete and len(unbroken) == len(replay.messages)):
                return messages
            start = unbroken[-1].number + 1
        self._warn_once(f"its replay has more than {MAX_REPLAY_BYTES} bytes")
        return messages

    def _changes_in(self, messages: Sequence[NumberedMessage]) -> list[BlockChange]:
        """Returns the changes. An invalid event can have been any change, so no block is known after it."""
        changes: list[BlockChange] = []
        for message in messages:
            try:
                for event in schema.events_in(message.payload):
                    changes += self._invalid() if event is None else self._reader.changes(event)
            except schema.UNREADABLE:
                changes += self._invalid()
        return changes

    def _invalid(self) -> list[BlockChange]:
        self._warn_once("one of its events is invalid")
        return [self._clear()]

    def _clear(self) -> Cleared:
        self._reader.forget()
        return Cleared()

    def _report(self, changes: Sequence[BlockChange]) -> None:
        if changes:
            self._listener(changes)

    def _warn_once(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("block events of %s: %s", self._name, problem)


def _unbroken(messages: list[NumberedMessage]) -> list[NumberedMessage]:
    """Returns the messages before the first gap."""
    first = messages[0].number if messages else 0
    return [message for index, message in enumerate(messages) if message.number == first + index]


class Subscription:
    """A subscription to all topics of an endpoint. Owns its sockets; ZeroMQ reconnects automatically."""

    def __init__(self, source: BlockSource, shared: "SharedContext | None" = None) -> None:
        """`shared`: the context of other subscriptions. Raises ConfigError for an invalid endpoint."""
        self._source = source
        shared = shared or SharedContext()
        with contextlib.ExitStack() as undo:
            self._context = shared.take()
            undo.callback(shared.release)
            self._events = self._context.socket(zmq.SUB)
            undo.callback(self._events.close, linger=0)
            self._events.setsockopt(zmq.RCVHWM, MESSAGES_QUEUED)
            self._events.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            self._events.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
            self._events.setsockopt(zmq.SUBSCRIBE, b"")
            self._connections = self._events.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
            undo.callback(self._connections.close, linger=0)
            undo.callback(self._events.disable_monitor)
            self._connect(self._events, source.endpoint)
            self._closing = undo.pop_all()
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._events, zmq.POLLIN)  # first, so that a connection is reported before its messages
        self._poller.register(self._connections, zmq.POLLIN)

    async def next(self, patience_s: float) -> NumberedMessage | SubscriptionEvent:
        """Returns the next message or event. A new connection is reported before its messages."""
        ready = dict(await self._poller.poll(round(patience_s * 1000)))
        if self._connections in ready:
            parse_monitor_message(await self._connections.recv_multipart())
            return SubscriptionEvent.JOINED
        if self._events in ready:
            return _message(await self._events.recv_multipart()) or SubscriptionEvent.GARBLED
        return SubscriptionEvent.SILENCE

    async def replay(self, start: int, *, patience_s: float, gap_s: float = REPLAY_GAP_S) -> Replayed:
        """Requests the messages from number `start` on. Raises ReplayError, also after `patience_s` of silence."""
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
                async with asyncio.timeout(gap_s if messages else patience_s):
                    frames = await socket.recv_multipart()
                if schema.END in frames[-2:-1]:
                    return Replayed(messages, complete=True)
                if (message := _message(frames)) is None:
                    raise ReplayError("its replay is malformed")
                messages.append(message)
                if (num_bytes := num_bytes + len(message.payload)) > MAX_REPLAY_BYTES:
                    return Replayed(messages, complete=False)
        except TimeoutError as exc:
            if messages:
                return Replayed(messages, complete=False)
            raise ReplayError(f"its replay was not received within {patience_s:g} s") from exc
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
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as exc:
            raise ConfigError(f"block events: {endpoint!r} is not an endpoint: {exc}") from exc


def _message(frames: list[bytes]) -> NumberedMessage | None:
    """Parses [topic, number, payload]. In a replay, an empty frame comes first, and the topic can be missing."""
    if len(frames) < 2 or len(frames[-2]) != schema.NUMBER_BYTES:
        return None
    return NumberedMessage(schema.number_in(frames[-2]), frames[-1])


class SharedContext:
    """One ZeroMQ context for all subscriptions of an event loop. It exists from the first `take` to the last `release`.
    With a context of their own, followers would use two threads and eight file descriptors for each worker."""

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None
        self._users = 0

    def take(self) -> zmq.asyncio.Context:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._users += 1
        return self._context

    def release(self) -> None:
        """Called by a subscription that has closed its sockets."""
        self._users -= 1
        if self._users == 0 and self._context is not None:
            context, self._context = self._context, None
            with contextlib.suppress(zmq.ZMQError):
                context.term()
