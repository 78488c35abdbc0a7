"""Two transfer threads in one process, with real sockets between them and a scripted transport."""

import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from motet.transfer import orders
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.side_channel import endpoint
from motet.transfer.ticket import TransferAddress
from motet.transfer.transport import ReadState
from tests.transfer.scripted import Wires
from tests.transfer.worker import LEASE_ID, PullFailure, Worker, dead_port, failure, order, ticket_at, worker


def test_pulls_of_one_reader_have_different_names_and_share_the_connection(p: Worker, d: Worker) -> None:
    p.thread.order(orders.LeasesHeld(1))
    for number in (1, 2, 3):
        d.thread.order(order(p.ticket(), number))
    assert {type(d.next_event()) for _ in range(3)} == {orders.PullLanded}
    done: set[str] = set()
    while len(done) < 3:
        if isinstance(event := p.next_event(), orders.ReaderDone):
            done.add(event.reader)
    assert done == {"d:1", "d:2", "d:3"}
    assert d.transport.connected == ["p"]


@pytest.mark.parametrize(("here", "there"), [("", "secret"), ("secret", ""), ("secret", "other")])
def test_a_pull_with_another_cluster_key_is_refused_before_it_reaches_the_owner(here: str, there: str) -> None:
    """The refusal is immediate: after a time-out the worker would be `UNREACHABLE`."""
    wires = Wires()
    with worker("p", wires, key=there) as p, worker("d", wires, key=here) as d, worker("d2", wires, key=there) as d2:
        d.thread.order(order(p.ticket()))
        event = d.next_event()
        assert failure(event) == PullFailure(kind=FailureKind.REFUSED, settled=True)
        assert "cluster key" in getattr(event, "message", "")
        d2.thread.order(orders.KeepAlive(p.ticket()))
        assert p.next_event() == orders.ReaderHeartbeat(LEASE_ID)  # its first event comes from the worker with the key
        d2.thread.order(orders.ReleaseTicket(p.ticket()))
        assert p.next_event() == orders.ReaderDone(LEASE_ID, "d2:without-1")


@pytest.mark.slow
def test_a_port_without_a_listener_is_unreachable_after_the_time_out() -> None:
    with dead_port() as port, worker("d", Wires(), pull_timeout_s=0.2) as d:
        ticket = ticket_at(TransferAddress("p", "127.0.0.1", port))
        d.thread.order(order(ticket))
        assert failure(d.next_event()) == PullFailure(kind=FailureKind.UNREACHABLE, settled=True)


def test_an_invalid_host_is_unreachable_for_every_order(d: Worker) -> None:
    ticket = ticket_at(TransferAddress("p", "no host", 5))
    d.thread.order(orders.KeepAlive(ticket))
    d.thread.order(orders.ReleaseTicket(ticket))
    d.thread.order(order(ticket))
    assert failure(d.next_event()) == PullFailure(kind=FailureKind.UNREACHABLE, settled=True)
    d.thread.order(orders.ConnectWorker(2, ticket.address))
    result = d.next_event()
    assert isinstance(result, orders.ConnectResult)
    assert result.error is not None
    assert result.error.kind is FailureKind.UNREACHABLE


def test_a_worker_that_restarts_at_its_address_is_detected_and_connected_again(wires: Wires) -> None:
    with worker("d", wires) as d:
        with worker("p1", wires) as p1:
            port = p1.thread.address.port
            old = p1.ticket()
            d.thread.order(order(old, 1))
            assert isinstance(d.next_event(), orders.PullLanded)
        with worker("p2", wires, port=port) as p2:
            d.thread.order(order(p2.ticket(), 2))
            assert isinstance(d.next_event(), orders.PullLanded)
            assert d.transport.connected == ["p2"]
            d.thread.order(order(old, 3))
            assert failure(d.next_event()) == PullFailure(kind=FailureKind.RESTARTED, settled=True)
            d.thread.order(order(p2.ticket(), 4))
            assert isinstance(d.next_event(), orders.PullLanded)


def test_a_dead_worker_costs_one_pull_and_is_connected_again_when_it_is_back(p: Worker, d: Worker) -> None:
    d.thread.order(order(p.ticket(), 1))
    assert isinstance(d.next_event(), orders.PullLanded)
    d.transport.blocks_state = ReadState.FAILED
    d.thread.order(order(p.ticket(), 2))
    assert failure(d.next_event()) == PullFailure(kind=FailureKind.PEER_LOST, settled=True)
    assert d.transport.connected == []
    d.transport.blocks_state = ReadState.DONE
    d.thread.order(order(p.ticket(), 3))
    assert isinstance(d.next_event(), orders.PullLanded)


def test_an_abandoned_pull_releases_its_lease_and_settles_when_its_read_ends(p: Worker, d: Worker) -> None:
    d.transport.blocks_state = ReadState.RUNNING
    d.thread.order(order(p.ticket()))
    assert p.next_event() == orders.ReaderHeartbeat(LEASE_ID)
    while not d.transport.runs:
        assert d.thread.take_events() == []
    d.thread.order(orders.AbandonPull(1))
    assert p.next_event() == orders.ReaderDone(LEASE_ID, "d:1")
    assert d.thread.take_events() == []
    d.transport.reads[-1].state = ReadState.DONE
    assert d.next_event() == orders.PullSettled(1)


def test_a_pull_abandoned_after_its_end_causes_no_second_event(p: Worker, d: Worker) -> None:
    d.thread.order(order(p.ticket(), 1))
    assert isinstance(d.next_event(), orders.PullLanded)
    d.thread.order(orders.AbandonPull(1))
    d.thread.order(orders.AbandonPull(99))
    d.thread.order(order(p.ticket(), 2))
    landed = d.next_event()
    assert isinstance(landed, orders.PullLanded)
    assert landed.number == 2


def test_a_pull_abandoned_before_the_worker_has_answered_settles_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, worker("d", Wires()) as d:
        d.thread.order(order(ticket_at(TransferAddress("p", "127.0.0.1", silent.getsockname()[1]))))
        d.thread.order(orders.AbandonPull(1))
        assert d.next_event() == orders.PullSettled(1)


def test_after_a_lost_notification_the_reader_has_its_data_and_the_lease_continues(p: Worker, d: Worker) -> None:
    p.thread.order(orders.LeasesHeld(1))
    p.transport.loses_notifications = True
    d.thread.order(order(p.ticket(), 1))
    assert isinstance(d.next_event(), orders.PullLanded)
    assert p.next_event() == orders.ReaderHeartbeat(LEASE_ID)
    p.transport.loses_notifications = False
    d.thread.order(order(p.ticket(), 2))
    # One event comes over the side channel, the other one over the transport, in any order.
    assert {p.next_event(), p.next_event()} == {orders.ReaderHeartbeat(LEASE_ID), orders.ReaderDone(LEASE_ID, "d:2")}


def test_junk_at_the_port_affects_no_worker(wires: Wires) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with worker("p", wires) as p, worker("d", wires) as d, context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        port = p.thread.address.port
        stranger.connect(endpoint("127.0.0.1", port))
        for number in range(1000):
            stranger.send_multipart([b"junk"] * (number % 5 + 1))
        with socket.create_connection(("127.0.0.1", port)) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100_000))
            d.thread.order(order(p.ticket()))
            assert isinstance(d.next_event(), orders.PullLanded)
        assert not stranger.poll(0)


@pytest.mark.slow
def test_an_idle_thread_does_not_wake_up() -> None:
    with worker("d", Wires()):
        time.sleep(0.1)  # not for synchronisation: the thread sleeps soon after its start
        assert any(has_rested() for _ in range(20)), "on a busy machine it starts late"


def has_rested() -> bool:
    before = num_sleeps()
    time.sleep(0.3)  # not for synchronisation: the thread must not wake up during this time
    return num_sleeps() == before


def num_sleeps() -> int:
    """Returns the number of times that the transfer thread of this process has gone to sleep."""
    (transfer,) = (thread for thread in threading.enumerate() if thread.name == "transfer")
    status = Path(f"/proc/self/task/{transfer.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_a_held_ticket_keeps_its_lease_alive_until_it_is_released(p: Worker, d: Worker) -> None:
    ticket = p.ticket(lease_s=0.3)
    d.thread.order(orders.KeepAlive(ticket))
    for _ in range(3):
        assert p.next_event() == orders.ReaderHeartbeat(LEASE_ID)
    d.thread.order(orders.ReleaseTicket(ticket))
    while (event := p.next_event()) == orders.ReaderHeartbeat(LEASE_ID):
        pass
    assert event == orders.ReaderDone(LEASE_ID, "d:without-1")


def test_a_held_ticket_connects_to_its_worker_early(p: Worker, d: Worker) -> None:
    d.thread.order(orders.KeepAlive(p.ticket()))
    d.thread.order(orders.ConnectWorker(5, p.thread.address))
    assert d.next_event() == orders.ConnectResult(5, None)
    assert len(d.transport.reads) == 1  # the first read


@pytest.mark.slow
@pytest.mark.long
def test_connecting_to_a_worker_that_cannot_be_read_from_gives_an_error(wires: Wires) -> None:
    with worker("d", wires, pull_timeout_s=5.0) as d:
        with worker("p", wires) as p:
            d.thread.order(orders.ConnectWorker(1, p.thread.address))
            assert d.next_event() == orders.ConnectResult(1, None)
            d.thread.order(orders.ConnectWorker(2, p.thread.address))
            assert d.next_event() == orders.ConnectResult(2, None)
            address = p.thread.address
            d.thread.order(orders.ConnectWorker(3, another_start(address, "another start")))
            assert error_of(d).kind is FailureKind.RESTARTED
        d.thread.order(orders.ConnectWorker(4, address))  # was connected, and has ended since
        assert error_of(d).kind is FailureKind.UNREACHABLE
        assert d.transport.connected == []


def another_start(address: TransferAddress, engine_id: str) -> TransferAddress:
    return msgspec.structs.replace(address, engine_id=engine_id)


def error_of(reader: Worker) -> TransferError:
    result = reader.next_event()
    assert isinstance(result, orders.ConnectResult)
    assert result.error is not None
    return result.error


def test_an_idle_worker_polls_its_transport_when_another_one_connects(p: Worker, d: Worker) -> None:
    d.thread.order(orders.ConnectWorker(1, p.thread.address))
    assert d.next_event() == orders.ConnectResult(1, None)
    while p.transport.num_polls < 10:  # this ends only if p polls
        time.sleep(0.001)
