"""Two transfer threads over each transport: the bytes that arrive equal the owner's."""

import itertools
import time
from collections.abc import Iterator

import pytest

from motet.transfer import orders
from motet.transfer.lease import LeaseTable
from motet.transfer.orders import FailureKind
from motet.transfer.thread import TransferSettings, TransferThread
from motet.transfer.ticket import Ticket
from tests.transfer.local import LocalNetwork
from tests.transfer.memory import EVERY_TRANSPORT, KVMemory, MakeTransport, without_poller
from tests.transfer.scripted import FACTS
from tests.transfer.worker import EventQueue, PullFailure, failure, granted, order

BLOCKS = (3, 4, 7)
starts = itertools.count()


class KVWorker:
    """A transfer thread with its own memory."""

    def __init__(self, make: MakeTransport, *, seed: int, pull_timeout_s: float = 10.0) -> None:
        self.kv = KVMemory(seed=seed)
        self.name = f"thread-{next(starts)}"
        settings = TransferSettings(
            host="127.0.0.1", port=0, cluster_key="secret", pull_timeout_s=pull_timeout_s, engine_id=self.name
        )
        memory = self.kv.memory
        self.thread = TransferThread(
            settings, FACTS, memory=memory, make_transport=lambda poller: make(self.name, memory, poller=poller)
        )
        self.next_event = EventQueue(self.thread).next
        self.leases = LeaseTable(self.kv.proof, seconds=60.0)

    def ticket(self) -> Ticket:
        """Returns a ticket for the blocks BLOCKS, under a new lease."""
        at = self.thread.address
        lease = granted(self.leases, self.kv.proof, BLOCKS, remote_engine_id=at.engine_id, remote_port=at.port)
        self.thread.order(orders.LeasesHeld(1))
        return lease.ticket

    def release(self, ticket: Ticket) -> None:
        self.leases.release(ticket.lease_id)
        self.thread.order(orders.LeasesHeld(0))


class Pair:
    def __init__(self, make: MakeTransport, *, pull_timeout_s: float = 10.0) -> None:
        self.owner = KVWorker(make, seed=1)
        self.reader = KVWorker(make, seed=2, pull_timeout_s=pull_timeout_s)

    def pull(self, ticket: Ticket) -> orders.TransferEvent:
        self.reader.thread.order(order(ticket))
        return self.reader.next_event()

    def close(self) -> None:
        self.reader.thread.close()
        self.owner.thread.close()


@pytest.fixture(params=EVERY_TRANSPORT)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(EVERY_TRANSPORT[request.param]())
    yield pair
    pair.close()


def test_only_the_destination_blocks_change_and_the_owner_is_notified(pair: Pair) -> None:
    before = pair.reader.kv.copy()
    ticket = pair.owner.ticket()
    landed = pair.pull(ticket)
    assert isinstance(landed, orders.PullLanded)
    assert landed.num_bytes == pair.owner.kv.blocks[:, BLOCKS].size
    pair.reader.kv.expect(before, pair.owner.kv, [(3, 0), (4, 1), (7, 2)])
    done = orders.ReaderDone(ticket.lease_id, f"{pair.reader.name}:1")
    # The heartbeat comes over the side channel, the other event over the transport, in any order.
    assert {pair.owner.next_event(), pair.owner.next_event()} == {orders.ReaderHeartbeat(ticket.lease_id), done}


def test_a_block_that_was_reused_makes_the_pull_stale(pair: Pair) -> None:
    ticket = pair.owner.ticket()
    pair.owner.kv.proof.increment_generations([4])
    assert failure(pair.pull(ticket)) == PullFailure(kind=FailureKind.STALE, settled=True)


def test_a_reader_detects_that_a_lease_has_ended_even_if_the_owner_is_idle(pair: Pair) -> None:
    ticket = pair.owner.ticket()
    pair.owner.release(ticket)
    assert failure(pair.pull(ticket)) == PullFailure(kind=FailureKind.LEASE_ENDED, settled=True)


def test_an_idle_worker_can_be_connected(pair: Pair) -> None:
    pair.reader.thread.order(orders.ConnectWorker(1, pair.owner.thread.address))
    assert pair.reader.next_event() == orders.ConnectResult(1, None)


def test_an_owner_that_has_gone_fails_the_pull_settled(pair: Pair) -> None:
    assert isinstance(pair.pull(pair.owner.ticket()), orders.PullLanded)
    ticket = pair.owner.ticket()
    pair.owner.thread.close()
    assert failure(pair.pull(ticket)) == PullFailure(kind=FailureKind.PEER_LOST, settled=True)


@pytest.mark.slow
def test_a_thread_whose_reader_has_gone_sleeps(pair: Pair) -> None:
    """The end of a connection makes its socket readable: a thread that did not read it would be busy for ever."""
    ticket = pair.owner.ticket()
    assert isinstance(pair.pull(ticket), orders.PullLanded)
    pair.owner.release(ticket)
    pair.reader.thread.close()
    before_s = time.process_time()
    time.sleep(0.2)  # not for synchronisation: the CPU time of this interval is measured
    assert time.process_time() - before_s < 0.1


@pytest.mark.slow
@pytest.mark.long
def test_a_pull_from_a_stopped_owner_times_out_and_settles_after_late_bytes() -> None:
    network = LocalNetwork()
    pair = Pair(without_poller(network.join), pull_timeout_s=5.0)
    before = pair.reader.kv.copy()
    ticket = pair.owner.ticket()
    pair.reader.thread.order(orders.ConnectWorker(5, pair.owner.thread.address))
    assert pair.reader.next_event() == orders.ConnectResult(5, None)
    network.stop(pair.owner.name)
    assert failure(pair.pull(ticket)) == PullFailure(kind=FailureKind.TIMEOUT, settled=False)
    pair.reader.kv.expect(before, pair.owner.kv, [])
    network.resume(pair.owner.name)
    assert pair.reader.next_event() == orders.PullSettled(1)
    pair.reader.kv.expect(before, pair.owner.kv, [(3, 0), (4, 1), (7, 2)])
    pair.close()
