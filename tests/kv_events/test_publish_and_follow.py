"""A publisher and its followers over real sockets: followers know which blocks are stored, also after lost messages."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import psutil
import pytest
import zmq

from motet.block_names import block_names
from motet.errors import ConfigError
from motet.kv_events import event_schema as schema
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored
from motet.kv_events.event_schema import port_of, replay_endpoint
from motet.kv_events.follower import (
    BlockSource,
    Follower,
    NumberedMessage,
    SharedContext,
    Subscription,
    SubscriptionEvent,
    follow_blocks,
)
from motet.kv_events.publisher import BlockPublisher, PublisherOptions, StoredBlocks
from tests.kv_events.names import apply_to
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

SIZE = 4


class Known:
    """The blocks that a follower knows, and an event for each change."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self._changed = asyncio.Event()

    def __call__(self, changes: Sequence[BlockChange]) -> None:
        apply_to(self.names, changes)
        self._changed.set()

    async def until(self, holds: Callable[[set[bytes]], bool]) -> None:
        """Waits until the condition is true; the test's time-out is the limit."""
        while not holds(self.names):
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def publisher(**changes: object) -> AsyncIterator[BlockPublisher]:
    options = PublisherOptions(block_size=SIZE, **changes)  # type: ignore[arg-type]
    publisher = BlockPublisher(options)
    try:
        yield publisher
    finally:
        await publisher.close()


@asynccontextmanager
async def following(endpoint: str, *, replay: bool = True) -> AsyncIterator[Known]:
    """Runs a follower, and cancels it at the end."""
    known = Known()
    source = BlockSource(endpoint, replay_endpoint(endpoint) if replay else None)
    task = asyncio.create_task(follow_blocks(source, known))
    try:
        yield known
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class Worker:
    """Stores and removes blocks of random prompts, some with a salt, and reports to `listener`."""

    def __init__(self, listener: Callable[[list[BlockChange]], None], seed: int) -> None:
        self.names: set[bytes] = set()
        self._listener = listener
        self._rng = random.Random(seed)

    def step(self) -> None:
        changes = [self._change() for _ in range(self._rng.randrange(1, 4))]
        apply_to(self.names, changes)
        self._listener(changes)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _change(self) -> BlockChange:
        roll = self._rng.random()
        if roll < 0.01:
            return Cleared()
        if roll < 0.4 and self.names:
            return Removed(tuple(self._rng.sample(sorted(self.names), min(len(self.names), 3))))
        salt = self._rng.choice(["", "pepper"])
        tokens = [self._rng.randrange(3)] * SIZE + [self._rng.randrange(200) for _ in range(SIZE * 4)]
        names = tuple(block_names(tokens, SIZE, salt=salt))
        return Stored(names, None, tuple(tokens), bool(salt))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_followers_know_the_stored_blocks_after_every_message(seed: int) -> None:
    async with publisher(messages_kept=20) as published, following(published.endpoint) as early:
        worker = Worker(published.publish, seed)
        for _ in range(10):
            worker.steps(15)
            await early.until(lambda names: names == worker.names)
            async with following(published.endpoint) as late:
                await late.until(lambda names: names == worker.names)
                worker.steps(3)
                await late.until(lambda names: names == worker.names)


@pytest.mark.parametrize("kept", [1, 1000])
async def test_a_late_follower_receives_all_blocks_for_any_number_of_kept_messages(kept: int) -> None:
    async with publisher(messages_kept=kept) as published:
        worker = Worker(published.publish, 5)
        worker.steps(300)
        async with following(published.endpoint) as known:
            await known.until(lambda names: names == worker.names)


async def test_dropped_messages_are_replayed_as_one_that_clears_and_stores_all_blocks() -> None:
    async with publisher(messages_kept=1) as published:
        Worker(published.publish, 5).steps(300)
        subscription = Subscription(BlockSource.of_motet(published.endpoint))
        replay = await subscription.replay(7, patience_s=PATIENCE_S, gap_s=PATIENCE_S)
        subscription.close()
    (message,) = replay.messages
    assert replay.complete and message.number == 300
    first, *others = schema.events_in(message.payload)
    assert first == schema.AllBlocksCleared()
    assert others and {type(event) for event in others} == {schema.BlockStored}


async def test_a_worker_that_restarts_at_its_address_is_followed_again() -> None:
    async with publisher() as published, following(published.endpoint) as known:
        Worker(published.publish, 1).steps(30)
        await known.until(lambda names: bool(names))
        endpoint = published.endpoint
        await published.close()
        async with publisher(port=port_of(endpoint)) as again:
            worker = Worker(again.publish, 2)
            worker.steps(40)
            await known.until(lambda names: names == worker.names)


async def test_a_follower_can_start_before_its_worker() -> None:
    async with publisher() as placeholder:
        endpoint = placeholder.endpoint
    async with following(endpoint) as known, publisher(port=port_of(endpoint)) as published:
        worker = Worker(published.publish, 3)
        worker.steps(5)
        await known.until(lambda names: names == worker.names)


class Lossy(Subscription):
    """A subscription that loses a third of the published messages."""

    def __init__(self, source: BlockSource) -> None:
        super().__init__(source)
        self._rng = random.Random(0)

    async def next(self, patience_s: float) -> NumberedMessage | SubscriptionEvent:
        while isinstance(received := await super().next(patience_s), NumberedMessage):
            if self._rng.random() < 0.7:
                break
        return received


@pytest.mark.parametrize("kept", [2, 1000])
async def test_a_follower_that_loses_messages_gets_them_again(kept: int) -> None:
    async with publisher(messages_kept=kept) as published:
        lossy, known = Lossy(BlockSource.of_motet(published.endpoint)), Known()
        follower = asyncio.create_task(Follower(lossy, known, name="w", silence_s=0.05).run())
        worker = Worker(published.publish, 7)
        for _ in range(10):
            worker.steps(9)
            await known.until(lambda names: names == worker.names)
        follower.cancel()
        with pytest.raises(asyncio.CancelledError):
            await follower
        lossy.close()


class DroppingPublisher:
    """Numbers its messages, sends only some of them, and has no replay."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.XPUB)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._number = -1

    def send(self, *changes: BlockChange, lost: bool = False) -> None:
        self._number += 1
        if not lost:
            payload = schema.payload([schema.event(change, SIZE) for change in changes], 0.0)
            self.socket.send_multipart([b"", schema.number_bytes(self._number), payload])

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()


async def test_a_message_lost_between_two_others_is_detected() -> None:
    a, b, c = (block_names([i] * SIZE, SIZE, salt="")[0] for i in range(3))
    stored = {name: Stored((name,), None, (i,) * SIZE) for i, name in enumerate((a, b, c))}
    dropping = DroppingPublisher()
    try:
        async with following(dropping.endpoint, replay=False) as known:
            while not await asyncio.to_thread(dropping.socket.poll, 100):  # until it has subscribed
                pass
            dropping.send(stored[a])
            await known.until(lambda names: names == {a})
            dropping.send(Removed((a,)), lost=True)
            dropping.send(stored[b])
            await known.until(lambda names: names == {b})
            dropping.socket.send_multipart([b"", b"short", b""])
            dropping.socket.send_multipart([b"garbage"])
            dropping.send(stored[c])
            await known.until(lambda names: names == {b, c})
    finally:
        dropping.close()


async def test_nothing_is_left_of_a_publisher_and_its_follower() -> None:
    process, tasks = psutil.Process(), asyncio.all_tasks()
    threads, native, sockets = threading.active_count(), process.num_threads(), len(process.net_connections())
    async with publisher() as published, following(published.endpoint) as known:
        worker = Worker(published.publish, 0)
        worker.steps(3)
        await known.until(lambda names: names == worker.names)
    await published.close()
    published.publish([Cleared()])  # an engine can end after its publisher
    assert asyncio.all_tasks() == tasks
    assert threading.active_count() == threads
    await until_threads(process, native)
    assert len(process.net_connections()) <= sockets


async def until_threads(process: psutil.Process, maximum: int) -> None:
    """Returns when the process has at most this number of threads: the system can count a thread for a moment after its
    end."""
    while process.num_threads() > maximum:  # noqa: ASYNC110  the system sends no event
        await asyncio.sleep(0)


async def test_subscriptions_with_a_shared_context_own_no_threads_and_leave_none() -> None:
    process, shared = psutil.Process(), SharedContext()
    threads = process.num_threads()
    async with publisher() as published:
        first = Subscription(BlockSource.of_motet(published.endpoint), shared)
        with_one = process.num_threads()
        others = [Subscription(BlockSource.of_motet(published.endpoint), shared) for _ in range(20)]
        assert process.num_threads() <= with_one
        others[0].close()
        assert await others[1].next(PATIENCE_S) is SubscriptionEvent.JOINED, "the others are not closed with it"
        replay = await first.replay(0, patience_s=PATIENCE_S, gap_s=PATIENCE_S)
        assert replay.complete
        for subscription in (first, *others[1:]):
            subscription.close()
    await until_threads(process, threads)
    later = Subscription(BlockSource.of_motet("tcp://127.0.0.1:1"), shared)
    later.close()
    await until_threads(process, threads)


async def test_a_reader_of_hashes_receives_the_removal_of_every_stored_hash() -> None:
    tokens = tuple(range(8))
    plain, salted = (tuple(block_names(tokens, SIZE, salt=salt)) for salt in ("", "pepper"))
    async with publisher() as published:
        published.publish([Stored(plain, None, tokens), Stored(salted, None, tokens, salted=True)])
        published.publish([Removed((*plain, *salted)), Stored(plain[:1], None, tokens[:4])])
        subscription = Subscription(BlockSource.of_motet(published.endpoint))
        replay = await subscription.replay(1, patience_s=PATIENCE_S, gap_s=PATIENCE_S)
        subscription.close()
    hashes: list[int | bytes] = []
    for event in (event for message in replay.messages for event in schema.events_in(message.payload)):
        match event:
            case schema.BlockStored():
                hashes += event.block_hashes
            case schema.BlockRemoved():
                for block in event.block_hashes:
                    hashes.remove(block)
    assert replay.complete and hashes == [schema.wire_hash(plain[0])]


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    async with publisher() as published:
        port = port_of(published.endpoint)
        with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port} and the port after it"):
            BlockPublisher(PublisherOptions(block_size=SIZE, port=port))


@pytest.mark.parametrize("endpoint", ["", "nonsense", "tcp://host", "tcp://host:port", "tcp://:5557", "http://h:80"])
def test_an_invalid_endpoint_is_an_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="not an endpoint"):
        BlockSource.of_motet(endpoint)


async def test_following_an_invalid_address_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    await follow_blocks(BlockSource("nonsense", None), Known())
    assert len(caplog.messages) == 1 and "'nonsense' is not an endpoint" in caplog.messages[0]


def test_stored_blocks_are_reported_in_runs_with_tokens_and_parents() -> None:
    tokens = tuple(range(16))
    a, b, c, d = block_names(tokens, SIZE, salt="")
    other = block_names(range(50, 58), SIZE, salt="pepper")
    stored = StoredBlocks()
    for change in (
        Stored((a, b), None, tokens[:8]),
        Stored((c, d), b, tokens[8:]),
        Stored(tuple(other), None, tuple(range(50, 58)), salted=True),
        Stored((a,), None, tokens[:4]),
    ):
        stored.apply(change)
    assert stored.salted_among([a, *other, b"unknown"]) == set(other)
    assert list(stored.changes()) == [
        Stored((a, b, c, d), None, tokens),
        Stored(tuple(other), None, tuple(range(50, 58)), salted=True),
    ]
    stored.apply(Removed((b, other[1])))
    assert list(stored.changes()) == [
        Stored((a,), None, tokens[:4]),
        Stored((c, d), b, tokens[8:]),
        Stored((other[0],), None, (50, 51, 52, 53), salted=True),
    ]
    stored.apply(Cleared())
    assert list(stored.changes()) == []


async def test_a_close_that_is_cancelled_still_closes_and_raises_the_cancellation() -> None:
    """Regression: the caller's cancellation was mistaken for the cancellation of the publisher's own task."""
    published = BlockPublisher(PublisherOptions(block_size=SIZE))
    closing = asyncio.create_task(published.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with publisher(port=port_of(published.endpoint)):
        """The ports are free."""


async def test_a_subscription_that_gets_no_socket_releases_the_context() -> None:
    """Regression: it kept the context, so the context of all followers was never closed."""
    shared = SharedContext()
    context = shared.take()
    context.set(zmq.MAX_SOCKETS, 1)
    with pytest.raises(zmq.ZMQError):
        Subscription(BlockSource("tcp://127.0.0.1:1", None), shared)
    shared.release()
    assert context.closed
