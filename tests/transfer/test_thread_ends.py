"""However a transfer thread ends, it leaves no thread and no descriptor open, and every pull has ended."""

import gc
import logging
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from motet.errors import ConfigError, EngineError, StartupError
from motet.transfer import orders
from motet.transfer.orders import FailureKind
from motet.transfer.thread import MakeTransport, TransferSettings, TransferThread
from motet.transfer.ticket import TransferAddress
from motet.transfer.transport import ReadState, RegisteredMemory, Transport
from tests.patience import PATIENCE_S
from tests.transfer.scripted import FACTS, MEMORY, ScriptedTransport, Wires
from tests.transfer.worker import LEASE_ID, Worker, dead_port, order, ticket_at, worker

pytestmark = pytest.mark.slow  # the search for leaks takes half a second per test


def descriptors() -> set[str]:
    """Returns the open descriptors of this process, with the files that they refer to."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return {f"{link.name} {os.readlink(link)}" for link in links if os.path.lexists(link)}


@pytest.fixture(autouse=True)
def nothing_is_leaked() -> Iterator[None]:
    gc.collect()
    threads, open_before = threading.active_count(), descriptors()
    yield
    assert threading.active_count() <= threads
    assert descriptors() <= open_before


def start(make: MakeTransport, *, port: int = 0, memory: RegisteredMemory = MEMORY) -> TransferThread:
    settings = TransferSettings(host="127.0.0.1", port=port, cluster_key="", pull_timeout_s=10.0, engine_id="d")
    return TransferThread(settings, FACTS, memory=memory, make_transport=make)


def test_an_idle_thread_can_be_closed_twice() -> None:
    with worker("d", Wires()) as d:
        pass
    assert d.transport.closed
    d.thread.close()


def test_an_owner_with_a_lease_and_a_reader_leaks_nothing(p: Worker, d: Worker) -> None:
    p.thread.order(orders.LeasesHeld(1))
    d.thread.order(order(p.ticket()))
    assert isinstance(d.next_event(), orders.PullLanded)


def test_closing_before_a_worker_answers_fails_the_pull_and_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, worker("d", Wires()) as d:
        address = TransferAddress("p", "127.0.0.1", silent.getsockname()[1])
        d.thread.order(order(ticket_at(address), 1))
        d.thread.order(orders.ConnectWorker(2, address))
        d.thread.close()
        failed, result = d.thread.take_events()
        assert failed == orders.PullFailed(1, FailureKind.CLOSED, "this worker is stopping", settled=True)
        assert isinstance(result, orders.ConnectResult)
        assert result.error is not None
        assert result.error.kind is FailureKind.CLOSED


@pytest.mark.parametrize(
    ("open_read", "abandoned", "settled"),
    [("blocks_state", False, False), ("blocks_state", True, None), ("proof_state", False, True)],
)
def test_a_pull_in_a_closed_thread_is_settled_once_the_transport_is_closed(
    p: Worker, d: Worker, open_read: str, abandoned: bool, settled: bool | None
) -> None:
    setattr(d.transport, open_read, ReadState.RUNNING)
    d.thread.order(order(p.ticket()))
    while not d.transport.runs:
        assert d.thread.take_events() == []
    if abandoned:
        d.thread.order(orders.AbandonPull(1))
    d.thread.close()
    message = "this worker is stopping"
    failed = [orders.PullFailed(1, FailureKind.CLOSED, message, settled)] if settled is not None else []
    assert d.thread.take_events() == failed + [orders.PullSettled(1)] * (not settled)


def test_closing_releases_the_lease_of_a_held_ticket(wires: Wires) -> None:
    with worker("p", wires) as p:
        with worker("d", wires) as d:
            d.thread.order(orders.KeepAlive(p.ticket()))
            p.next_event()
        assert p.next_event() == orders.ReaderDone(LEASE_ID, "d:without-1")


def test_closing_right_after_an_order_fails_the_pull() -> None:
    with dead_port() as port, worker("d", Wires()) as d:
        d.thread.order(order(ticket_at(TransferAddress("p", "127.0.0.1", port))))
        d.thread.close()
        failed = orders.PullFailed(1, FailureKind.CLOSED, "this worker is stopping", settled=True)
        assert d.thread.take_events() == [failed]


def test_a_transport_that_cannot_start_raises_in_the_constructor() -> None:
    def fail(_: zmq.Poller) -> Transport:
        raise StartupError("no such network")

    with pytest.raises(StartupError, match="no such network"):
        start(fail)


def test_a_taken_port_names_the_flag_and_leaks_nothing() -> None:
    with worker("p", Wires()) as p, pytest.raises(ConfigError, match="--side-channel-port"):
        start(lambda _: ScriptedTransport("d", Wires()), port=p.thread.address.port)


class BrokenTransport(ScriptedTransport):
    def poll(self) -> list[bytes]:
        raise ZeroDivisionError("a bug")


def test_a_crash_of_the_thread_is_raised_when_events_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    thread = start(lambda _: BrokenTransport("d", Wires()))
    with caplog.at_level(logging.CRITICAL, logger="motet.transfer.thread"):
        thread.order(orders.LeasesHeld(1))
        readable, _, _ = select.select([thread.fileno()], [], [], PATIENCE_S)
        assert readable
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            thread.take_events()
    thread.close()
