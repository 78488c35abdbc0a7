"""Two transfer threads over each transport: the bytes that land are the bytes that the owner had."""

import itertools
from collections.abc import Iterator

import pytest

from motet.transfer import orders
from motet.transfer.lease import LeaseTable
from motet.transfer.orders import FailureKind
from motet.transfer.thread import TransferSettings, TransferThread
from motet.transfer.ticket import Ticket
from tests.transfer.local import LocalNetwork
from tests.transfer.memory import EVERY_TRANSPORT, KVMemory, MakeTransport
from tests.transfer.scripted import FACTS
from tests.transfer.worker import NewsQueue, ending, granted, order

BLOCKS = (3, 4, 7)
starts = itertools.count()


class KVWorker:
    """A transfer thread over memory of its own."""

    def __init__(self, make: MakeTransport, *, seed: int, pull_timeout_s: float = 10.0) -> None:
        self.kv = KVMemory(seed=seed)
        self.name = f"thread-{next(starts)}"
        settings = TransferSettings("127.0.0.1", 0, "secret", pull_timeout_s, self.name)
        memory = self.kv.memory
        self.thread = TransferThread(settings, FACTS, memory=memory, make_transport=lambda: make(self.name, memory))
        self.news = NewsQueue(self.thread).next
        self.leases = LeaseTable(self.kv.proof, seconds=60.0)

    def ticket(self) -> Ticket:
        """Returns a ticket for the blocks BLOCKS, under a new lease."""
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


@pytest.fixture(params=EVERY_TRANSPORT)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(EVERY_TRANSPORT[request.param]())
    yield pair
    pair.close()


def test_the_bytes_land_where_they_should_and_nowhere_else_and_the_owner_hears_of_it(pair: Pair) -> None:
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


def test_a_reader_finds_out_that_a_lease_is_over_even_if_the_owner_is_idle(pair: Pair) -> None:
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


@pytest.mark.slow
def test_a_pull_from_a_stopped_owner_times_out_and_settles_after_late_bytes() -> None:
    network = LocalNetwork()
    pair = Pair(network.join, pull_timeout_s=1.0)
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
