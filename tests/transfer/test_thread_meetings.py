"""Two transfer threads before there is a pull: heartbeats for tickets, and workers that meet."""

import time

import msgspec

from motet.transfer.base import FailureKind, Met, ReaderDone, ReaderWaits, TransferError
from motet.transfer.ticket import TransferAddress
from tests.transfer.scripted import Wires
from tests.transfer.worker import LEASE_ID, Worker, worker


def test_an_expected_ticket_keeps_its_lease_alive_until_it_is_released() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        ticket = p.ticket(lease_s=0.3)
        d.thread.expect(ticket)
        for _ in range(3):
            assert p.news() == ReaderWaits(LEASE_ID)
        d.thread.release(ticket)
        while (news := p.news()) == ReaderWaits(LEASE_ID):
            pass
        assert news == ReaderDone(LEASE_ID, "d:without-1")


def test_an_expected_ticket_meets_its_worker_early() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        d.thread.expect(p.ticket())
        d.thread.meet(5, p.thread.address)
        assert d.news() == Met(5, None)
        assert len(d.transport.reads) == 1  # the wiring one


def test_meeting_tells_whether_a_worker_can_be_read_from() -> None:
    wires = Wires()
    with worker("d", wires, pull_timeout_s=0.2) as d:
        with worker("p", wires) as p:
            d.thread.meet(1, p.thread.address)
            assert d.news() == Met(1, None)
            d.thread.meet(2, p.thread.address)
            assert d.news() == Met(2, None)
            address = p.thread.address
            d.thread.meet(3, another_start(address, "another start"))
            assert error_of(d).kind is FailureKind.RESTARTED
        d.thread.meet(4, address)  # met before, gone since
        assert error_of(d).kind is FailureKind.UNREACHABLE
        assert d.transport.connected == []


def another_start(address: TransferAddress, engine_id: str) -> TransferAddress:
    return msgspec.structs.replace(address, engine_id=engine_id)


def error_of(reader: Worker) -> TransferError:
    met = reader.news()
    assert isinstance(met, Met)
    assert met.error is not None
    return met.error


def test_an_idle_worker_attends_to_one_who_wants_to_meet_it() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        d.thread.meet(1, p.thread.address)
        assert d.news() == Met(1, None)
        while p.transport.polls < 50:  # it does poll: this ends
            time.sleep(0.001)
