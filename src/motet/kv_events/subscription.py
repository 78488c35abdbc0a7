"""A follower's sockets: what is published, when the connection is made anew, and replays."""

import asyncio
import contextlib
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from motet.errors import ConfigError
from motet.kv_events import schema
from motet.kv_events.endpoint import replay_endpoint
from motet.kv_events.shared_context import SharedContext

MESSAGES_QUEUED = 10_000
"""While their reader is busy; then the publisher drops some, which their numbers tell."""
MESSAGES_REPLAYED = 100_000
"""Queued at most. vLLM drops what its own queue does not take, so ours must be long."""
MOST_BYTES = 2**28
"""Of a message, which may tell of a million blocks; a publisher that sends a larger one is disconnected."""
QUIET_S = 1.0
"""When nothing more comes of a replay for so long, the rest of it was dropped."""
REDIAL_MS = 100
REDIAL_MOST_MS = 5_000


@dataclass(frozen=True)
class BlockSource:
    """Where a worker tells of its blocks."""

    endpoint: str
    replay: str | None
    """None: what was missed cannot be asked for."""

    @classmethod
    def ours(cls, endpoint: str) -> "BlockSource":
        """One of our servers. Raises ConfigError for what is no `tcp://HOST:PORT`."""
        return cls(endpoint, replay_endpoint(endpoint))


@dataclass(frozen=True)
class Message:
    number: int
    payload: bytes


@dataclass(frozen=True)
class Joined:
    """A connection was made: the first one, or another, perhaps to another process."""


@dataclass(frozen=True)
class Silence:
    """Nothing was heard for a while."""


@dataclass(frozen=True)
class Garbled:
    """Something came that is no message."""


Heard = Message | Joined | Silence | Garbled


@dataclass(frozen=True)
class Replay:
    messages: list[Message]
    whole: bool
    """Whether its end came."""


class ReplayError(Exception):
    """What was missed cannot be had."""


class Subscription:
    """Owns its sockets; ZeroMQ redials by itself. All topics of the endpoint are taken."""

    def __init__(self, source: BlockSource, shared: SharedContext | None = None) -> None:
        """`shared`: with other subscriptions. Raises ConfigError for what can be no endpoint."""
        self._source = source
        self._shared = shared or SharedContext()
        self._context = self._shared.take()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.RCVHWM, MESSAGES_QUEUED)
        self._events.setsockopt(zmq.RECONNECT_IVL, REDIAL_MS)
        self._events.setsockopt(zmq.RECONNECT_IVL_MAX, REDIAL_MOST_MS)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._connections = self._events.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        try:
            self._connect(self._events, source.endpoint)
        except ConfigError:
            self.close()
            raise
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._connections, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)

    async def hear(self, patience_s: float) -> Heard:
        """The next thing; that a connection is new comes before what came through it."""
        ready = dict(await self._poller.poll(round(patience_s * 1000)))
        if self._connections in ready:
            parse_monitor_message(await self._connections.recv_multipart())
            return Joined()
        if self._events in ready:
            return _message(await self._events.recv_multipart()) or Garbled()
        return Silence()

    async def replay(self, start: int, *, patience_s: float) -> Replay:
        """The messages from number `start` on that the publisher still has. Raises ReplayError, also when no answer
        comes in `patience_s`."""
        if self._source.replay is None:
            raise ReplayError("it does not replay")
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, MESSAGES_REPLAYED)
        messages: list[Message] = []
        try:
            self._connect(socket, self._source.replay)
            await socket.send_multipart([b"", schema.number_bytes(start)])
            while True:
                # Not wait_for, which before Python 3.12 swallows being cancelled as the answer comes.
                async with asyncio.timeout(QUIET_S if messages else patience_s):
                    frames = await socket.recv_multipart()
                if schema.END in frames[-2:-1]:
                    return Replay(messages, whole=True)
                if (message := _message(frames)) is None:
                    raise ReplayError("its replay means nothing")
                messages.append(message)
        except TimeoutError as exc:
            if messages:
                return Replay(messages, whole=False)
            raise ReplayError(f"its replay did not come in {patience_s:g} s") from exc
        except ConfigError as exc:
            raise ReplayError(str(exc)) from exc
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        self._events.disable_monitor()
        self._connections.close(linger=0)
        self._events.close(linger=0)
        with contextlib.suppress(zmq.ZMQError):
            self._shared.give_back()

    @staticmethod
    def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as exc:
            raise ConfigError(f"block events: {endpoint!r} is no endpoint: {exc}") from exc


def _message(frames: list[bytes]) -> Message | None:
    """Of [topic, number, payload], and of a replay, which has an empty frame before, and may lack the topic."""
    if len(frames) < 2 or len(frames[-2]) != schema.NUMBER_BYTES:
        return None
    return Message(schema.number_in(frames[-2]), frames[-1])
