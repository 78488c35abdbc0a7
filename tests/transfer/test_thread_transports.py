"""Two transfer threads over each transport there is: the bytes that land are the bytes that were there."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from motet.transfer import orders
from motet.transfer.lease import LeaseTable
from motet.transfer.nixl import LOOPBACK, NixlTransport
from motet.transfer.orders import FailureKind
from motet.transfer.thread import TransferSettings, TransferThread
from motet.transfer.ticket import Ticket
from motet.transfer.transport import Memory, Transport
from tests.transfer.local import LocalNetwork
from tests.transfer.memory import KVMemory
from tests.transfer.scripted import FACTS
from tests.transfer.worker import NewsStand, ending, granted, order

MakeTransport = Callable[[str, Memory], Transport]
BLOCKS = (3, 4, 7)
starts = itertools.count()


class KVWorker:
    """A transfer thread over memory of its own."""

    def __init__(self, make: MakeTransport, *, seed: int, pull_timeout_s: float = 10.0) -> None:
        self.kv = KVMemory(seed=seed)
        self.name = f"{make.__name__}-{next(starts)}"
        settings = TransferSettings("127.0.0.1", 0, "secret", pull_timeout_s, self.name)
        memory = self.kv.memory
        self.thread = TransferThread(settings, FACTS, memory, lambda: make(self.name, memory))
        self.news = NewsStand(self.thread).next
        self.leases = LeaseTable(self.kv.proof, seconds=60.0)

    def ticket(self) -> Ticket:
        """Of these blocks, under a new lease."""
        at = self.thread.address
        lease = granted(self.leases, self.kv.proof, BLOCKS, remote_engine_id=at.engine_id, remote_port=at.port)
        self.thread.order(orders.LeasesHeld(1))
        return lease.ticket

    def end_lease(self, ticket: Ticket) -> None:
        self.leases.end(ticket.lease_id)
        self.thread.order(orders.LeasesHeld(0))


class Pair:
    def __init__(self, make: MakeTransport, *, pull_timeout_s: float = 10.0) -> None:
        self.owner = KVWorker(make, seed=1)
        self.reader = KVWorker(make, seed=2, pull_timeout_s=pull_timeout_s)

    def pull(self, ticket: Ticket) -> orders.News:
        self.reader.thread.order(order(ticket))
        return self.reader.news()

    def close(self) -> None:
        self.reader.thread.close()
        self.owner.thread.close()


def local() -> MakeTransport:
    network = LocalNetwork()

    def join(name: str, memory: Memory) -> Transport:
        return network.join(name, memory)

    return join


def shared_memory() -> MakeTransport:
    def agent(name: str, memory: Memory) -> Transport:
        return NixlTransport(name, memory, ucx=LOOPBACK)

    return agent


def tcp() -> MakeTransport:
    def tcp_agent(name: str, memory: Memory) -> Transport:
        return NixlTransport(name, memory, ucx=LOOPBACK | {"TLS": "tcp"})

    return tcp_agent


@pytest.fixture(params=[local, shared_memory, tcp])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param())
    yield pair
    pair.close()


def test_the_bytes_land_where_they_should_and_nowhere_else_and_the_lease_is_told(pair: Pair) -> None:
    before = pair.reader.kv.copy()
    ticket = pair.owner.ticket()
    landed = pair.pull(ticket)
    assert isinstance(landed, orders.PullLanded)
    assert landed.num_bytes == pair.owner.kv.blocks[:, BLOCKS].size
    pair.reader.kv.expect(before, pair.owner.kv, [(3, 0), (4, 1), (7, 2)])
    done = orders.ReaderDone(ticket.lease_id, f"{pair.reader.name}:1")
    assert {pair.owner.news(), pair.owner.news()} == {orders.ReaderWaits(ticket.lease_id), done}  # by two ways


def test_a_block_that_was_given_away_makes_the_pull_stale(pair: Pair) -> None:
    ticket = pair.owner.ticket()
    pair.owner.kv.proof.raise_generations([4])
    assert ending(pair.pull(ticket)) == (FailureKind.STALE, True)


def test_a_lease_that_is_over_is_found_out_at_an_idle_owner_too(pair: Pair) -> None:
    ticket = pair.owner.ticket()
    pair.owner.end_lease(ticket)
    assert ending(pair.pull(ticket)) == (FailureKind.LEASE_ENDED, True)


def test_an_idle_worker_is_met(pair: Pair) -> None:
    pair.reader.thread.order(orders.MeetWorker(1, pair.owner.thread.address))
    assert pair.reader.news() == orders.Met(1, None)


def test_an_owner_that_has_gone_fails_the_pull_settled(pair: Pair) -> None:
    assert isinstance(pair.pull(pair.owner.ticket()), orders.PullLanded)
    ticket = pair.owner.ticket()
    pair.owner.thread.close()
    assert ending(pair.pull(ticket)) == (FailureKind.PEER_LOST, True)


def test_a_stopped_owner_times_the_pull_out_and_what_lands_later_lands_before_it_is_settled() -> None:
    network = LocalNetwork()

    def join(name: str, memory: Memory) -> Transport:
        return network.join(name, memory)

    pair = Pair(join, pull_timeout_s=1.0)
    before = pair.reader.kv.copy()
    ticket = pair.owner.ticket()
    pair.reader.thread.order(orders.MeetWorker(5, pair.owner.thread.address))
    assert pair.reader.news() == orders.Met(5, None)
    network.stop(pair.owner.name)
    assert ending(pair.pull(ticket)) == (FailureKind.TIMEOUT, False)
    pair.reader.kv.expect(before, pair.owner.kv, [])
    network.go_on(pair.owner.name)
    assert pair.reader.news() == orders.PullSettled(1)
    pair.reader.kv.expect(before, pair.owner.kv, [(3, 0), (4, 1), (7, 2)])
    pair.close()
