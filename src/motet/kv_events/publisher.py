"""Tells whoever listens what becomes of a worker's prompt blocks, and tells it again to those who missed it.

    PUB      every change, numbered from 0, to all who subscribed; who does not keep up misses some
    ROUTER   asked for everything from a number on: the messages if they are still kept; else one with the last number,
             AllBlocksCleared and all that is stored now, which brings anyone up to date. Then one numbered -1.

The first message of a publisher is AllBlocksCleared: nothing that was said at this address before is true any more.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import zmq
import zmq.asyncio

from motet.errors import ConfigError
from motet.kv_events import schema
from motet.kv_events.changes import BlockChange, Cleared, Removed
from motet.kv_events.endpoint import port_of, replay_endpoint, tcp
from motet.kv_events.stored_now import StoredNow

logger = logging.getLogger(__name__)

MESSAGES_QUEUED = 10_000
"""For a subscriber that does not keep up; more are dropped, and it asks for them."""
EVENTS_AT_ONCE = 16
"""Of all that is stored now are written; then other work gets its turn."""
REPLAY_TIMEOUT_S = 10.0
"""Who does not take its replay in this time gets no more of it: the next one waits."""
FREE_PORT_TRIES = 50


@dataclass(frozen=True, kw_only=True)
class PublisherOptions:
    block_size: int
    host: str = "127.0.0.1"
    port: int = 0
    """Replays come from the port after it. 0: two free ones."""
    topic: str = "kv-events"
    messages_kept: int = 1000
    """For replays; a message is what one step of the engine brought."""
    clock: Callable[[], float] = time.time


class BlockPublisher:
    """Of one worker. Made inside an event loop; `publish` never blocks."""

    def __init__(self, options: PublisherOptions) -> None:
        """Raises ConfigError if the ports cannot be had."""
        self._options = options
        self._topic = options.topic.encode()
        self._next = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.messages_kept)
        self._now = StoredNow()
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._async_context = zmq.asyncio.Context(self._context)
        try:
            self._events, self._replays, self.endpoint = self._bound()
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.publish([Cleared()])
        self._answering = asyncio.create_task(self._answer_replays())

    def publish(self, changes: Sequence[BlockChange]) -> None:
        """A `BlockListener`. After `close` it does nothing."""
        if self._closed:
            return
        payload = schema.payload([self._applied(change) for change in changes], self._options.clock())
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        self._events.send_multipart([self._topic, schema.number_bytes(number), payload], zmq.NOBLOCK)

    async def close(self) -> None:
        """Ends both sockets. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._answering.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._answering
        finally:
            self._replays.close(linger=0)
            self._events.close(linger=0)
            self._context.term()

    def _bound(self) -> tuple["zmq.Socket[bytes]", zmq.asyncio.Socket, str]:
        host, port = self._options.host, self._options.port
        for _ in range(1 if port else FREE_PORT_TRIES):
            events = self._context.socket(zmq.PUB)
            replays = self._async_context.socket(zmq.ROUTER)
            try:
                for socket in (events, replays):
                    socket.setsockopt(zmq.IPV6, 1)
                events.setsockopt(zmq.SNDHWM, MESSAGES_QUEUED)
                replays.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that a full queue makes us wait, not lose
                events.bind(tcp(host, port or "*"))
                endpoint = tcp(host, port_of(events.getsockopt_string(zmq.LAST_ENDPOINT)))
                replays.bind(replay_endpoint(endpoint))
            except zmq.ZMQError as exc:
                events.close(linger=0)
                replays.close(linger=0)
                failure = exc
            else:
                return events, replays, endpoint
        where = f"{tcp(host, port)} and the port after it" if port else f"two free ports of {host}"
        raise ConfigError(f"block events: {where} cannot be listened on: {failure}")

    async def _answer_replays(self) -> None:
        while True:
            match await self._replays.recv_multipart():
                case [client, b"", start] if len(start) == schema.NUMBER_BYTES:
                    await self._answer(client, schema.number_in(start))
                case frames:
                    logger.warning("block events: a replay was asked for in %d frames that mean nothing", len(frames))

    async def _answer(self, client: bytes, start: int) -> None:
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                messages = self._kept_from(start)
                for number, payload in [await self._everything()] if messages is None else messages:
                    answer = [client, b"", self._topic, schema.number_bytes(number), payload]
                    await self._replays.send_multipart(answer)
                await self._replays.send_multipart([client, b"", b"", schema.END, b""])
        except (TimeoutError, zmq.ZMQError) as exc:
            logger.warning("block events: a replay ended early, who asked for it does not listen: %r", exc)

    def _kept_from(self, start: int) -> list[tuple[int, bytes]] | None:
        """None: they are not kept any more, or never were."""
        oldest = self._next - len(self._kept)
        return list(islice(self._kept, start - oldest, None)) if oldest <= start <= self._next else None

    async def _everything(self) -> tuple[int, bytes]:
        """As of when it is called."""
        number, stored = self._next - 1, self._now.changes()
        events = [schema.event(Cleared(), self._options.block_size)]
        while some := [schema.event(change, self._options.block_size) for change in islice(stored, EVENTS_AT_ONCE)]:
            events += some
            await asyncio.sleep(0)
        return number, schema.payload(events, self._options.clock())

    def _applied(self, change: BlockChange) -> msgspec.Raw:
        """Its event. Hashes of salted prompts were never told, so their removal is not either."""
        salted = self._now.salted_among(change.names) if isinstance(change, Removed) else ()
        self._now.apply(change)
        return schema.event(change, self._options.block_size, salted=salted)
