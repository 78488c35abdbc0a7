"""Publishes the changes of a worker's prompt blocks, and repeats them for subscribers that missed some.

    PUB      sends every change, numbered from 0, to all subscribers; a subscriber that is too slow misses some
    ROUTER   answers a request for all messages from a number on. If they are kept, it sends them; otherwise it sends
             one message that has the last number, AllBlocksCleared and all blocks that are stored now, which brings any
             follower up to date. It ends with a message that has the number -1.

The first message of a publisher is AllBlocksCleared: earlier messages from this address do not hold any more."""

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from motet.block_names import BlockName
from motet.errors import ConfigError
from motet.kv_events import event_schema as schema
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored

logger = logging.getLogger(__name__)

MESSAGES_QUEUED = 10_000
"""Maximum number of messages queued for a slow subscriber, which then requests the dropped ones."""
EVENTS_PER_TURN = 16
"""Number of events of a replay after which other tasks of the event loop run."""
REPLAY_TIMEOUT_S = 10.0
"""Time in seconds in which a follower must receive its replay, because the next follower waits."""
FREE_PORT_TRIES = 50
MAX_BLOCKS_PER_CHANGE = 256
"""Maximum number of blocks in one change, so that a long replay consists of several events."""


@dataclass(frozen=True, kw_only=True)
class PublisherOptions:
    block_size: int
    host: str = "127.0.0.1"
    port: int = 0
    """Port for subscribers; replays use the next port. 0 means two free ports."""
    topic: str = "kv-events"
    messages_kept: int = 1000
    """Number of messages kept for replays. A message has the changes of one step of the engine."""
    clock: Callable[[], float] = time.time


class BlockPublisher:
    """Publishes the changes of one worker. It must be made inside an event loop; `publish` never blocks."""

    def __init__(self, options: PublisherOptions) -> None:
        """Raises ConfigError if the ports are not free."""
        self._options = options
        self._topic = options.topic.encode()
        self._next = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.messages_kept)
        self._stored = StoredBlocks()
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
        """Sends changes to every subscriber, as a `BlockListener`. Has no effect after `close`."""
        if self._closed:
            return
        payload = schema.payload([self._applied(change) for change in changes], self._options.clock())
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        self._events.send_multipart([self._topic, schema.number_bytes(number), payload], zmq.NOBLOCK)

    async def close(self) -> None:
        """Closes both sockets. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._answering.cancel()
        try:
            await asyncio.wait([self._answering])
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
                replays.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that sending to a full queue waits and drops nothing
                events.bind(schema.tcp(host, port or "*"))
                endpoint = schema.tcp(host, schema.port_of(events.getsockopt_string(zmq.LAST_ENDPOINT)))
                replays.bind(schema.replay_endpoint(endpoint))
            except zmq.ZMQError as exc:
                events.close(linger=0)
                replays.close(linger=0)
                failure = exc
            else:
                return events, replays, endpoint
        where = f"{schema.tcp(host, port)} and the port after it" if port else f"two free ports of {host}"
        raise ConfigError(f"block events: cannot listen on {where}: {failure}")

    async def _answer_replays(self) -> None:
        while True:
            match await self._replays.recv_multipart():
                case [client, b"", start] if len(start) == schema.NUMBER_BYTES:
                    await self._answer(client, schema.number_in(start))
                case frames:
                    logger.warning("block events: a request for a replay has %d frames and cannot be read", len(frames))

    async def _answer(self, client: bytes, start: int) -> None:
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                oldest = self._next - len(self._kept)
                is_kept = oldest <= start <= self._next
                messages = list(islice(self._kept, start - oldest, None)) if is_kept else [await self._everything()]
                for number, payload in messages:
                    answer = [client, b"", self._topic, schema.number_bytes(number), payload]
                    await self._replays.send_multipart(answer)
                await self._replays.send_multipart([client, b"", b"", schema.END, b""])
        except (TimeoutError, zmq.ZMQError) as exc:
            logger.warning("block events: a replay ended early, because the follower does not take it: %r", exc)

    async def _everything(self) -> tuple[int, bytes]:
        """Returns number and payload of a message with all blocks that are stored when this is called."""
        number, stored = self._next - 1, self._stored.changes()
        events = [schema.event(Cleared(), self._options.block_size)]
        while some := [schema.event(change, self._options.block_size) for change in islice(stored, EVENTS_PER_TURN)]:
            events += some
            await asyncio.sleep(0)
        return number, schema.payload(events, self._options.clock())

    def _applied(self, change: BlockChange) -> msgspec.Raw:
        """Applies a change, and returns its event. Never publishes hashes of salted prompts, nor their removal."""
        salted = self._stored.salted_among(change.names) if isinstance(change, Removed) else ()
        self._stored.apply(change)
        return schema.event(change, self._options.block_size, salted=salted)


class _Block(NamedTuple):
    parent: BlockName | None
    tokens: bytes
    """Token ids as unsigned 32-bit numbers, which take an eighth of the memory of a tuple."""
    salted: bool


class StoredBlocks:
    """The blocks that are stored now, in the order in which they were stored, with all data for their events."""

    def __init__(self) -> None:
        self._blocks: dict[BlockName, _Block] = {}

    def salted_among(self, names: Iterable[BlockName]) -> set[BlockName]:
        return {name for name in names if (block := self._blocks.get(name)) is not None and block.salted}

    def apply(self, change: BlockChange) -> None:
        match change:
            case Stored(names, parent, token_ids, salted):
                tokens = array("I", token_ids).tobytes()
                size = len(tokens) // len(names)
                for index, name in enumerate(names):
                    self._blocks.setdefault(name, _Block(parent, tokens[index * size : (index + 1) * size], salted))
                    parent = name
            case Removed():
                for name in change.names:
                    self._blocks.pop(name, None)
            case Cleared():
                self._blocks.clear()

    def changes(self) -> Iterator[Stored]:
        """Yields changes with all blocks that are stored when this is called, for a new follower."""
        return _runs(list(self._blocks.items()))


def _runs(blocks: list[tuple[BlockName, _Block]]) -> Iterator[Stored]:
    run: list[tuple[BlockName, _Block]] = []
    for name, block in blocks:
        if run and (block.parent != run[-1][0] or len(run) == MAX_BLOCKS_PER_CHANGE):
            yield _joined(run)
            run = []
        run.append((name, block))
    if run:
        yield _joined(run)


def _joined(run: list[tuple[BlockName, _Block]]) -> Stored:
    tokens = array("I", b"".join(block.tokens for _, block in run))
    return Stored(tuple(name for name, _ in run), run[0][1].parent, tuple(tokens), run[0][1].salted)
