"""Two transfer threads in one process: real sockets between them, a scripted transport beneath."""

import socket
import time

import msgspec
import pytest
import zmq

from motet.transfer.base import (
    Failed,
    FailureKind,
    Landed,
    Met,
    ReaderDone,
    ReaderWaits,
    ReadState,
    Settled,
)
from motet.transfer.door import endpoint
from motet.transfer.ticket import TransferAddress
from tests.transfer.scripted import FACTS, NUM_BLOCKS, Wires
from tests.transfer.worker import LEASE_ID, LEASE_SLOT, Worker, dead_port, order, ticket_at, worker

SOON_S = 5.0
"""What fails at once takes less, however busy the machine is; a time-out here takes longer."""


def failed(reader: Worker) -> Failed:
    news = reader.news()
    assert isinstance(news, Failed), news
    return news


def test_a_pull_reads_long_runs_checks_the_proof_and_tells_the_lease() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        p.thread.holding(1)
        d.thread.pull(order(p.ticket((3, 4, 7))))
        landed = d.news()
        assert isinstance(landed, Landed)
        assert (landed.number, landed.num_bytes, landed.num_descriptors) == (1, 3 * 64, 2)
        assert p.news() == ReaderWaits(LEASE_ID)
        assert p.news() == ReaderDone(LEASE_ID, "d:1")


def test_pulls_of_one_reader_have_names_of_their_own_and_share_the_connection() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        p.thread.holding(1)
        for number in (1, 2, 3):
            d.thread.pull(order(p.ticket(), number))
        assert {type(d.news()) for _ in range(3)} == {Landed}
        done: set[str] = set()
        while len(done) < 3:
            if isinstance(news := p.news(), ReaderDone):
                done.add(news.reader)
        assert done == {"d:1", "d:2", "d:3"}
        assert d.transport.connected == ["p"]


def test_another_layout_is_refused_at_once_with_both_sides_shown() -> None:
    wires = Wires()
    theirs = msgspec.structs.replace(FACTS, dtype="bfloat16")
    with worker("p", wires) as p, worker("d", wires, facts=theirs) as d:
        began_s = time.monotonic()
        d.thread.pull(order(p.ticket()))
        news = failed(d)
        assert (news.kind, news.settled) == (FailureKind.REFUSED, True)
        assert "dtype is bfloat16 here and float32 there" in news.message
        assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize(("here", "there"), [("", "secret"), ("secret", ""), ("secret", "other")])
def test_without_the_same_cluster_key_a_pull_is_refused_at_once_and_the_lease_hears_nothing(
    here: str, there: str
) -> None:
    wires = Wires()
    with worker("p", wires, key=there) as p, worker("d", wires, key=here) as d, worker("d2", wires, key=there) as d2:
        began_s = time.monotonic()
        d.thread.pull(order(p.ticket()))
        news = failed(d)
        assert (news.kind, news.settled) == (FailureKind.REFUSED, True)
        assert "cluster key" in news.message
        assert time.monotonic() - began_s < SOON_S
        d2.thread.expect(p.ticket())
        assert p.news() == ReaderWaits(LEASE_ID)  # the first thing it hears comes from one who has the key
        d2.thread.release(p.ticket())
        assert p.news() == ReaderDone(LEASE_ID, "d2:without-1")


def test_the_same_cluster_key_lets_a_pull_through() -> None:
    wires = Wires()
    with worker("p", wires, key="secret") as p, worker("d", wires, key="secret") as d:
        d.thread.pull(order(p.ticket()))
        assert isinstance(d.news(), Landed)


def test_nobody_at_the_port_is_unreachable_in_a_bounded_time() -> None:
    with dead_port() as port, worker("d", Wires(), pull_timeout_s=0.2) as d:
        ticket = ticket_at(TransferAddress("p", "127.0.0.1", port))
        d.thread.pull(order(ticket))
        news = failed(d)
        assert (news.kind, news.settled) == (FailureKind.UNREACHABLE, True)


def test_a_host_that_is_none_is_unreachable_for_every_order() -> None:
    with worker("d", Wires()) as d:
        ticket = ticket_at(TransferAddress("p", "no host", 5))
        d.thread.expect(ticket)
        d.thread.release(ticket)
        d.thread.pull(order(ticket))
        assert failed(d).kind is FailureKind.UNREACHABLE
        d.thread.meet(2, ticket.address)
        met = d.news()
        assert isinstance(met, Met)
        assert met.error is not None
        assert met.error.kind is FailureKind.UNREACHABLE


def test_a_worker_that_was_restarted_at_its_address_is_noticed_and_met_again() -> None:
    wires = Wires()
    with worker("d", wires) as d:
        with worker("p1", wires) as p1:
            port = p1.thread.address.port
            old = p1.ticket()
            d.thread.pull(order(old, 1))
            assert isinstance(d.news(), Landed)
        with worker("p2", wires, port=port) as p2:
            d.thread.pull(order(p2.ticket(), 2))
            assert isinstance(d.news(), Landed)
            assert d.transport.connected == ["p2"]
            d.thread.pull(order(old, 3))
            news = failed(d)
            assert (news.kind, news.settled) == (FailureKind.RESTARTED, True)
            d.thread.pull(order(p2.ticket(), 4))
            assert isinstance(d.news(), Landed)


def test_a_dead_worker_costs_one_pull_and_is_met_again_when_it_is_back() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        d.thread.pull(order(p.ticket(), 1))
        assert isinstance(d.news(), Landed)
        d.transport.blocks = ReadState.FAILED
        d.thread.pull(order(p.ticket(), 2))
        assert failed(d).kind is FailureKind.PEER_LOST
        assert d.transport.connected == []
        d.transport.blocks = ReadState.DONE
        d.thread.pull(order(p.ticket(), 3))
        assert isinstance(d.news(), Landed)


def test_a_read_that_hangs_fails_by_the_deadline_and_settles_when_it_ends() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires, pull_timeout_s=0.3) as d:
        d.transport.blocks = ReadState.RUNNING
        d.thread.pull(order(p.ticket()))
        news = failed(d)
        assert (news.kind, news.settled) == (FailureKind.TIMEOUT, False)
        assert p.news() == ReaderWaits(LEASE_ID)
        assert p.news() == ReaderDone(LEASE_ID, "d:1")
        d.transport.reads[-1].state = ReadState.DONE
        assert d.news() == Settled(1)


def test_an_abandoned_pull_settles_when_its_read_ends_and_the_lease_is_told_before() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        d.transport.blocks = ReadState.RUNNING
        d.thread.pull(order(p.ticket()))
        assert p.news() == ReaderWaits(LEASE_ID)
        while not d.transport.runs:
            assert d.thread.news() == []
        d.thread.abandon(1)
        assert p.news() == ReaderDone(LEASE_ID, "d:1")
        assert d.thread.news() == []
        d.transport.reads[-1].state = ReadState.DONE
        assert d.news() == Settled(1)


def test_a_pull_abandoned_after_its_end_gets_no_second_one() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        d.thread.pull(order(p.ticket(), 1))
        assert isinstance(d.news(), Landed)
        d.thread.abandon(1)
        d.thread.abandon(99)
        d.thread.pull(order(p.ticket(), 2))
        landed = d.news()
        assert isinstance(landed, Landed)
        assert landed.number == 2


def test_a_pull_abandoned_before_the_worker_has_answered_settles_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, worker("d", Wires()) as d:
        d.thread.pull(order(ticket_at(TransferAddress("p", "127.0.0.1", silent.getsockname()[1]))))
        d.thread.abandon(1)
        assert d.news() == Settled(1)


def test_a_lost_notification_leaves_the_reader_with_its_data_and_the_lease_to_its_end() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        p.thread.holding(1)
        p.transport.loses_notifications = True
        d.thread.pull(order(p.ticket(), 1))
        assert isinstance(d.news(), Landed)
        assert p.news() == ReaderWaits(LEASE_ID)
        p.transport.loses_notifications = False
        d.thread.pull(order(p.ticket(), 2))
        assert p.news() == ReaderWaits(LEASE_ID)
        assert p.news() == ReaderDone(LEASE_ID, "d:2")


def test_a_lease_that_is_over_and_blocks_that_were_reused_fail_the_pull() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        ticket = p.ticket((3, 4))
        p.transport.shows[4] += 1
        d.thread.pull(order(ticket, 1))
        assert failed(d).kind is FailureKind.STALE
        p.transport.shows[NUM_BLOCKS + LEASE_SLOT] = 0
        d.thread.pull(order(ticket, 2))
        assert failed(d).kind is FailureKind.LEASE_ENDED


def test_junk_at_the_port_harms_nobody() -> None:
    wires = Wires()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with worker("p", wires) as p, worker("d", wires) as d, context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        port = p.thread.address.port
        stranger.connect(endpoint("127.0.0.1", port))
        for number in range(1000):
            stranger.send_multipart([b"junk"] * (number % 5 + 1))
        with socket.create_connection(("127.0.0.1", port)) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100_000))
            d.thread.pull(order(p.ticket()))
            assert isinstance(d.news(), Landed)
        assert not stranger.poll(0)


def test_with_nothing_to_do_the_thread_does_not_wake_up() -> None:
    with worker("d", Wires()) as d:
        time.sleep(0.3)
        assert d.thread.rounds == 1
