"""Measures what many workers cost a gateway over real sockets: status requests, block events, tokens.

question   a keeper's look at a worker: it sends GET /engine to a server over a scripted engine, reads the report and
           updates the fleet. CPU time of this process and of the server
message    a message of block events, from the socket into the index. CPU time of the thread that follows, without
           ZeroMQ's own threads
followed   file descriptors and threads for one worker whose block events are followed
token      `motet gateway` in front of such a server: CPU time of the gateway, by psutil, with a step every PACE_S
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import psutil

from bench.cell_size.index_memory import names
from bench.frontend.__main__ import Case, Server
from bench.frontend.raw_client import Clients
from motet.deploy.block_events import indexing
from motet.deploy.child import ChildServer
from motet.deploy.remote_keeper import KeptEngine, RemoteKeeper
from motet.engine import Worker
from motet.engines.http import server_client
from motet.engines.remote import EngineServer, RemoteEngine
from motet.engines.wire import EngineReport
from motet.kv_events import event_schema as schema
from motet.kv_events.changes import BlockChange, Removed, Stored
from motet.kv_events.follower import BlockSource, SharedContext, Subscription, follow_blocks
from motet.kv_events.publisher import BlockPublisher, PublisherOptions
from motet.routing.fleet import Fleet
from motet.routing.prefix_index import PrefixIndex

BLOCK_SIZE = 16
EVENT_BLOCKS = 84
EVENT_PACE_S = 0.002
PACE_S = 0.02
CLIENTS = 64
MAX_TOKENS = 128
FOLLOWED = 50
REPEATS = 3
"""Measurements of block events, of which the median counts."""


@dataclass(frozen=True)
class QuestionCost:
    asker_us: float
    answerer_us: float


@dataclass(frozen=True)
class EventCost:
    blocks: int
    """Number of blocks that a message stores; it removes as many."""
    bytes: int
    message_us: float


@dataclass(frozen=True)
class FollowedCost:
    """What a gateway opens for one worker whose block events it follows."""

    descriptors: float
    threads: float


@dataclass(frozen=True)
class TokenCost:
    n: int
    alone_us: float
    """CPU time of a server without a gateway."""
    gateway_us: float
    """CPU time of the gateway in front of it."""


def question_cost(questions: int) -> QuestionCost:
    with Server("motet") as server:
        return asyncio.run(_ask(server, questions))


async def _ask(server: Server, questions: int) -> QuestionCost:
    fleet = Fleet()
    fleet.expect("w", server.url)
    async with server_client() as client:
        asked = EngineServer(server.url, client)

        async def join(report: EngineReport) -> KeptEngine:
            engine = RemoteEngine(asked, report)
            fleet.put(Worker("w", engine, server.url, local=False))
            return engine

        keeper = RemoteKeeper(
            "w", server.url, report=asked.report, join=join, problem=lambda _: None, fleet=fleet, silence_s=5.0
        )
        await keeper.look()
        own_s, its_s = time.process_time(), server.cpu_s
        for _ in range(questions):
            await keeper.look()
        own_s, its_s = time.process_time() - own_s, server.cpu_s - its_s
        await keeper.close()
    return QuestionCost(own_s / questions * 1e6, its_s / questions * 1e6)


def event_cost(messages: int, blocks: int) -> EventCost:
    """Messages come at a pace, so that each wakes the follower, as in a gateway with many workers."""
    message_us = median(asyncio.run(_follow(messages, blocks)) for _ in range(REPEATS))
    return EventCost(blocks, _Told(messages, blocks).message_bytes, message_us)


async def _follow(messages: int, blocks: int) -> float:
    """Returns microseconds a message."""
    told = _Told(messages, blocks)
    teller = threading.Thread(target=lambda: asyncio.run(told.tell()))
    teller.start()
    try:
        await asyncio.to_thread(told.bound.wait)
        index, seen, all_seen = PrefixIndex(), 0, asyncio.Event()
        take = indexing(index, "w")

        def listen(changes: Sequence[BlockChange]) -> None:
            nonlocal seen
            take(changes)
            seen += sum(isinstance(change, Stored) for change in changes)
            if seen == 1:
                told.heard.set()
            elif seen > messages:
                all_seen.set()

        following = asyncio.create_task(follow_blocks(BlockSource.ours(told.endpoint), listen))
        await asyncio.to_thread(told.heard.wait)
        spent_s = time.thread_time()
        await all_seen.wait()
        spent_s = time.thread_time() - spent_s
        following.cancel()
        await asyncio.wait([following])
    finally:
        told.heard.set()
        told.done.set()
        teller.join()
    return spent_s / messages * 1e6


class _Told:
    """A worker with a full cache, in a thread of its own: each message stores a prompt and removes another one."""

    def __init__(self, messages: int, blocks: int) -> None:
        self.bound, self.heard, self.done = threading.Event(), threading.Event(), threading.Event()
        self.endpoint = ""
        self._messages = messages
        self._blocks = blocks

    async def tell(self) -> None:
        publisher = BlockPublisher(PublisherOptions(block_size=BLOCK_SIZE))
        self.endpoint = publisher.endpoint
        publisher.publish([self._stored(0)])
        self.bound.set()
        await asyncio.to_thread(self.heard.wait)
        for number in range(1, self._messages + 1):
            publisher.publish(self._changes(number))
            await asyncio.sleep(EVENT_PACE_S)
        await asyncio.to_thread(self.done.wait)
        await publisher.close()

    @property
    def message_bytes(self) -> int:
        return len(schema.payload([schema.event(change, BLOCK_SIZE) for change in self._changes(1)], time.time()))

    def _changes(self, number: int) -> list[BlockChange]:
        return [Removed(self._stored(number - 1).names), self._stored(number)]

    def _stored(self, number: int) -> Stored:
        found = tuple(names(number * self._blocks, self._blocks))
        return Stored(found, None, tuple(range(10_000, 10_000 + self._blocks * BLOCK_SIZE)))


def followed_cost(workers: int = FOLLOWED) -> FollowedCost:
    """Opens subscriptions to an address where nobody listens; a connection would add one descriptor to each."""
    return asyncio.run(_followed(workers))


async def _followed(workers: int) -> FollowedCost:
    process = psutil.Process()
    shared = SharedContext()
    first = Subscription(BlockSource.ours("tcp://127.0.0.1:1"), shared)
    descriptors, threads = process.num_fds(), process.num_threads()
    more = [Subscription(BlockSource.ours("tcp://127.0.0.1:1"), shared) for _ in range(workers)]
    grown = FollowedCost((process.num_fds() - descriptors) / workers + 1, (process.num_threads() - threads) / workers)
    for subscription in (first, *more):
        subscription.close()
    return grown


def token_cost(n: int, *, repeats: int) -> TokenCost:
    case = Case("completions", n, CLIENTS, max_tokens=MAX_TOKENS, requests=1)
    with Server("motet", "--burst", "1", "--rest-s", str(PACE_S)) as server:
        alone = psutil.Process(server.pid)
        alone_us = _token_us(case, server.url, alone, repeats)
        with ChildServer(["--worker", server.url], command="gateway") as gateway:
            return TokenCost(n, alone_us, _token_us(case, gateway.url, psutil.Process(gateway.pid), repeats))


def _token_us(case: Case, url: str, process: psutil.Process, repeats: int) -> float:
    with Clients(url, case.clients) as clients:
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
