"""Measures the cost of many workers for a gateway over real sockets: status requests, block events, tokens.

status     a keeper's check of a worker: it sends GET /engine to a server over a scripted engine, reads the report and
           updates the fleet. CPU time of this process and of the server
message    a message of block events, from the socket into the index. CPU time of the thread that follows the worker,
           without ZeroMQ's own threads
followed   file descriptors and threads for one worker whose block events are followed
token      `motet gateway` in front of such a server, with a step every PACE_S: CPU time of the gateway, from psutil
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import psutil

from bench.cell_size.index_memory import names
from bench.frontend.raw_client import LoadCase, RawClients
from bench.frontend.server_process import ServerProcess
from motet.deploy.block_events import indexing
from motet.deploy.child import ChildServer
from motet.deploy.remote_keeper import KeeperLimits, KeptEngine, RemoteKeeper, WorkerCalls
from motet.engine import Worker
from motet.engines.http import server_client
from motet.engines.remote import EngineServer, RemoteEngine
from motet.engines.wire import EngineReport
from motet.kv_events import event_schema
from motet.kv_events.changes import BlockChange, Removed, Stored
from motet.kv_events.follower import BlockSource, SharedContext, Subscription, follow_blocks
from motet.kv_events.publisher import BlockPublisher, PublisherOptions
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.prefix_index import PrefixIndex

BLOCK_SIZE = 16

EVENT_PACE_S = 0.002
PACE_S = 0.02
CLIENTS = 64
MAX_TOKENS = 128
FOLLOWED = 50
REPEATS = 3
"""Number of measurements of block events; the median counts."""


@dataclass(frozen=True)
class StatusCost:
    gateway_us: float
    worker_us: float


@dataclass(frozen=True)
class EventCost:
    blocks: int
    """Number of blocks that a message stores. It removes the same number."""
    bytes: int
    message_us: float


@dataclass(frozen=True)
class FollowedCost:
    """Resources that a gateway opens for one worker whose block events it follows."""

    descriptors: float
    threads: float


@dataclass(frozen=True)
class TokenCost:
    n: int
    alone_us: float
    """CPU time of a server without a gateway."""
    gateway_us: float
    """CPU time of the gateway in front of it."""


def status_cost(requests: int) -> StatusCost:
    with ServerProcess("motet") as server:
        return asyncio.run(_status_cost(server, requests))


async def _status_cost(server: ServerProcess, requests: int) -> StatusCost:
    fleet = Fleet()
    fleet.expect("w", server.url)
    async with server_client() as client:
        worker = EngineServer(server.url, client)

        async def join(report: EngineReport) -> KeptEngine:
            engine = RemoteEngine(worker, report)
            fleet.put(Worker("w", engine, server.url, local=False))
            return engine

        calls = WorkerCalls(report=worker.report, problem=lambda _: None, join=join)
        keeper = RemoteKeeper("w", server.url, calls=calls, fleet=fleet, limits=KeeperLimits(silence_s=5.0))
        await keeper.check()
        gateway_s, worker_s = time.process_time(), server.cpu_s
        for _ in range(requests):
            await keeper.check()
        gateway_s, worker_s = time.process_time() - gateway_s, server.cpu_s - worker_s
        await keeper.close()
    return StatusCost(gateway_s / requests * 1e6, worker_s / requests * 1e6)


def event_cost(messages: int, blocks: int) -> EventCost:
    """Sends messages at a pace, so that each wakes the follower, as in a gateway with many workers."""
    message_us = median(asyncio.run(_follow(messages, blocks)) for _ in range(REPEATS))
    return EventCost(blocks, _PublishingWorker(messages, blocks).message_bytes, message_us)


async def _follow(messages: int, blocks: int) -> float:
    """Returns microseconds per message."""
    worker = _PublishingWorker(messages, blocks)
    publishing = threading.Thread(target=lambda: asyncio.run(worker.publish()))
    publishing.start()
    try:
        await asyncio.to_thread(worker.bound.wait)
        index, received, all_received = PrefixIndex(), 0, asyncio.Event()
        update_index = indexing(index, "w")

        def on_changes(changes: Sequence[BlockChange]) -> None:
            nonlocal received
            update_index(changes)
            received += sum(isinstance(change, Stored) for change in changes)
            if received == 1:
                worker.followed.set()
            elif received > messages:
                all_received.set()

        following = asyncio.create_task(follow_blocks(BlockSource.of_motet(worker.endpoint), on_changes))
        await asyncio.to_thread(worker.followed.wait)
        spent_s = time.thread_time()
        await all_received.wait()
        spent_s = time.thread_time() - spent_s
        following.cancel()
        await asyncio.wait([following])
    finally:
        worker.followed.set()
        worker.done.set()
        publishing.join()
    return spent_s / messages * 1e6


class _PublishingWorker:
    """A worker with a full cache, in a separate thread. Each message stores one prompt and removes another."""

    def __init__(self, messages: int, blocks: int) -> None:
        self.bound, self.followed, self.done = threading.Event(), threading.Event(), threading.Event()
        self.endpoint = ""
        self._messages = messages
        self._blocks = blocks

    async def publish(self) -> None:
        publisher = BlockPublisher(PublisherOptions(block_size=BLOCK_SIZE))
        self.endpoint = publisher.endpoint
        publisher.publish([self._stored(0)])
        self.bound.set()
        await asyncio.to_thread(self.followed.wait)
        for number in range(1, self._messages + 1):
            publisher.publish(self._changes(number))
            await asyncio.sleep(EVENT_PACE_S)
        await asyncio.to_thread(self.done.wait)
        await publisher.close()

    @property
    def message_bytes(self) -> int:
        changes = [event_schema.event(change, BLOCK_SIZE) for change in self._changes(1)]
        return len(event_schema.payload(changes, time.time()))

    def _changes(self, number: int) -> list[BlockChange]:
        return [Removed(self._stored(number - 1).names), self._stored(number)]

    def _stored(self, number: int) -> Stored:
        stored_names = tuple(names(number * self._blocks, self._blocks))
        return Stored(stored_names, None, tuple(range(10_000, 10_000 + self._blocks * BLOCK_SIZE)))


def followed_cost(workers: int = FOLLOWED) -> FollowedCost:
    """Opens subscriptions to an address without a publisher. A connection would add one descriptor to each."""
    return asyncio.run(_followed(workers))


async def _followed(workers: int) -> FollowedCost:
    process = psutil.Process()
    shared = SharedContext()
    first = Subscription(BlockSource.of_motet("tcp://127.0.0.1:1"), shared)
    descriptors, threads = process.num_fds(), process.num_threads()
    more = [Subscription(BlockSource.of_motet("tcp://127.0.0.1:1"), shared) for _ in range(workers)]
    grown = FollowedCost((process.num_fds() - descriptors) / workers + 1, (process.num_threads() - threads) / workers)
    for subscription in (first, *more):
        subscription.close()
    return grown


def token_cost(n: int, *, repeats: int) -> TokenCost:
    case = LoadCase("completions", n, CLIENTS, max_tokens=MAX_TOKENS, requests=1)
    with ServerProcess("motet", "--burst", "1", "--rest-s", str(PACE_S)) as server:
        alone = psutil.Process(server.pid)
        alone_us = _token_us(case, server.url, alone, repeats)
        with ChildServer(["--worker", server.url], command="gateway") as gateway:
            return TokenCost(n, alone_us, _token_us(case, gateway.url, psutil.Process(gateway.pid), repeats))


def _token_us(case: LoadCase, url: str, process: psutil.Process, repeats: int) -> float:
    with RawClients(url, case.clients) as clients:
        clients.load(case.request, requests=1)
        spent = []
        for _ in range(repeats):
            before_s = _cpu_s(process)
            case.check(clients.load(case.request, requests=1))
            spent.append(_cpu_s(process) - before_s)
    return median(spent) / case.tokens * 1e6


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
