"""The rounds of the transfer thread: it sleeps as long as it can, and one order or message that raises an error ends no
other. The test sets the clock."""

import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import pytest
import zmq

from motet.transfer import orders, side_channel
from motet.transfer.loop import DEREGISTER_TIMEOUT_S, POLL_AFTER_MESSAGE_S, POLL_MS, TransferLoop
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.peer import Peer, PeerChannel, Peers, ReaderTerms
from motet.transfer.reader import TrunkReader
from motet.transfer.ticket import ClusterKey, TransferAddress
from motet.transfer.transport import ReadState
from tests.clock import Clock
from tests.transfer.scripted import FACTS, MEMORY, ScriptedRead, ScriptedTransport, Wires
from tests.transfer.worker import order, ticket_at

PATIENCE_MS = 10_000
FOR_EVER = None


@dataclass
class LoopScene:
    """A transfer loop without a thread: the test runs its rounds."""

    loop: TransferLoop
    peers: Peers
    transport: ScriptedTransport
    clock: Clock
    listening: "zmq.Socket[bytes]"
    remote_reader: "zmq.Socket[bytes]"
    events: list[orders.TransferEvent] = field(default_factory=list)

    def order(self, order: orders.Order) -> None:
        self.loop.follow(order, self.clock.now_s)

    def send_to_listener(self, message: side_channel.ChannelRequest, key: str = "") -> None:
        """Sends a message to the listener, as a reader does."""
        self.remote_reader.send(side_channel.encode(message, ClusterKey(key), nonce=side_channel.new_nonce()))
        assert self.listening.poll(PATIENCE_MS)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopScene]:
    monkeypatch.setattr(side_channel, "LINGER_MS", 0)  # no worker reads the last messages of these tests
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clock, key = Clock(), ClusterKey("secret")
    transport = ScriptedTransport("p", Wires())
    listening, _, port = side_channel.listen("127.0.0.1", 0, context=context)
    remote_reader = context.socket(zmq.DEALER)
    remote_reader.connect(side_channel.endpoint("127.0.0.1", port))
    events: list[orders.TransferEvent] = []
    poller = zmq.Poller()
    peers = Peers(
        lambda address: side_channel.SideChannelClient(address, context, poller=poller, key=key),
        ReaderTerms(FACTS, 2.0, clock),
        transport,
    )
    loop = TransferLoop(
        reader=TrunkReader(engine_id="p", peers=peers, pull_timeout_s=10.0, publish=events.append, clock=clock),
        listener=side_channel.SideChannelListener(listening, key, FACTS, side_channel.Welcome("p", b"p", MEMORY)),
        transport=transport,
        publish=events.append,
        clock=clock,
    )
    yield LoopScene(loop, peers, transport, clock, listening, remote_reader, events)
    loop.close()
    context.destroy(linger=0)


NOWHERE = TransferAddress("absent", "127.0.0.1", 1)


def test_an_idle_thread_sleeps_without_a_limit_and_does_not_poll_the_transport(scene: LoopScene) -> None:
    assert scene.loop.run_round() is FOR_EVER
    assert scene.transport.num_polls == 0


def test_an_idle_thread_that_a_peer_wakes_polls_the_transport_once_and_sleeps_again(scene: LoopScene) -> None:
    scene.transport.wakes, scene.transport.inbox = True, [msgspec.msgpack.encode(orders.ReaderDone(5, "d:1"))]
    assert scene.loop.run_round() is FOR_EVER
    assert scene.events == [orders.ReaderDone(5, "d:1")]
    assert scene.loop.run_round() is FOR_EVER
    assert scene.transport.num_polls == 1


def test_while_leases_are_held_the_transport_is_polled_every_millisecond(scene: LoopScene) -> None:
    scene.order(orders.LeasesHeld(2))
    assert scene.loop.run_round() == POLL_MS
    assert scene.transport.num_polls == 1
    scene.order(orders.LeasesHeld(0))
    assert scene.loop.run_round() is FOR_EVER


@pytest.mark.parametrize("message", [side_channel.Hello("p", FACTS), orders.ReaderHeartbeat(5)])
def test_after_a_message_from_a_reader_the_transport_is_polled_for_two_seconds(
    scene: LoopScene, message: side_channel.ChannelRequest
) -> None:
    scene.send_to_listener(message, key="secret")
    assert scene.loop.run_round() == POLL_MS
    scene.clock.now_s += POLL_AFTER_MESSAGE_S - 0.1
    assert scene.loop.run_round() == POLL_MS
    assert scene.transport.num_polls == 2
    scene.clock.now_s += 0.1
    assert scene.loop.run_round() is FOR_EVER


def test_a_message_without_the_cluster_key_does_not_start_polling(scene: LoopScene) -> None:
    scene.send_to_listener(side_channel.Hello("p", FACTS), key="other")
    assert scene.loop.run_round() is FOR_EVER


def test_a_pull_is_advanced_every_millisecond_until_it_has_ended(scene: LoopScene) -> None:
    scene.order(order(ticket_at(NOWHERE)))
    assert scene.loop.run_round() == POLL_MS
    scene.order(orders.AbandonPull(1))
    assert scene.loop.run_round() == POLL_MS  # the worker can still answer
    scene.clock.now_s += 2.0
    assert scene.loop.run_round() is FOR_EVER


def test_the_thread_sleeps_between_two_heartbeats(scene: LoopScene) -> None:
    ticket = ticket_at(NOWHERE, lease_s=60.0)
    scene.order(orders.KeepAlive(ticket))
    assert scene.loop.run_round() == POLL_MS  # a Hello was sent
    scene.clock.now_s += 2.0
    assert scene.loop.run_round() == 18_000
    scene.clock.now_s += 17.9995
    assert scene.loop.run_round() == 1
    scene.clock.now_s = math.ceil(scene.clock.now_s)
    assert scene.loop.run_round() == POLL_MS  # another Hello was sent
    scene.order(orders.ReleaseTicket(ticket))
    scene.clock.now_s += 2.0
    assert scene.loop.run_round() is FOR_EVER


def test_a_notification_that_cannot_be_read_is_dropped(scene: LoopScene) -> None:
    scene.transport.inbox = [b"junk", msgspec.msgpack.encode(orders.ReaderDone(5, "r"))]
    scene.order(orders.LeasesHeld(1))
    scene.loop.run_round()
    assert scene.events == [orders.ReaderDone(5, "r")]


def bug(*_: object) -> NoReturn:
    """Raises an unexpected error."""
    raise ZeroDivisionError("a bug")


def test_an_order_that_raises_fails_alone_and_the_next_one_is_followed(
    scene: LoopScene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scene.peers, "at", bug)
    scene.order(order(ticket_at(NOWHERE), 7))
    scene.order(orders.ConnectWorker(8, NOWHERE))
    scene.order(orders.ReleaseTicket(ticket_at(NOWHERE)))
    scene.order(orders.KeepAlive(ticket_at(NOWHERE)))
    scene.loop.run_round()  # a heartbeat is due
    failed, connected = scene.events
    assert isinstance(failed, orders.PullFailed) and (failed.number, failed.settled) == (7, True)
    assert isinstance(connected, orders.ConnectResult) and connected.number == 8 and connected.error is not None
    assert "ZeroDivisionError('a bug')" in failed.message
    assert "ZeroDivisionError('a bug')" in connected.error.message
    assert len([record for record in caplog.records if record.exc_info]) == 4, "each with its traceback"
    monkeypatch.undo()
    scene.order(order(ticket_at(NOWHERE), 9))
    scene.order(orders.AbandonPull(9))
    assert scene.events[2:] == [orders.PullSettled(9)]


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_id": "\ud800"},
        {"engine_id": b"bytes"},
        {"host": 5},
        {"host": "\ud800"},
        {"host": "h" * 10_000},
        {"port": "text"},
        {"port": 2**80},
        {"port": None},
    ],
    ids=lambda changes: ascii(changes)[:40],
)
def test_a_wrong_address_fails_only_the_order_that_has_it(scene: LoopScene, changes: dict[str, object]) -> None:
    wrong = msgspec.structs.replace(NOWHERE, **changes)
    ticket = msgspec.structs.replace(
        ticket_at(NOWHERE), remote_engine_id=wrong.engine_id, remote_host=wrong.host, remote_port=wrong.port
    )
    for one in (
        orders.KeepAlive(ticket),
        order(ticket, 7),
        orders.ConnectWorker(8, wrong),
        orders.ReleaseTicket(ticket),
    ):
        scene.order(one)
        scene.loop.run_round()
    scene.clock.now_s += 60.0
    scene.loop.run_round()
    assert {type(event) for event in scene.events} == {orders.PullFailed, orders.ConnectResult}
    scene.order(order(ticket_at(NOWHERE), 9))
    scene.order(orders.AbandonPull(9))
    assert scene.events[2:] == [orders.PullSettled(9)]


def test_a_pull_that_raises_fails_alone_and_holds_its_blocks_until_the_close(
    scene: LoopScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerChannel, "send_heartbeat", bug)
    scene.order(order(ticket_at(NOWHERE), 7))
    scene.loop.run_round()
    (failed,) = scene.events
    assert isinstance(failed, orders.PullFailed) and (failed.number, failed.settled) == (7, False)
    scene.order(orders.AbandonPull(7))
    scene.loop.run_round()
    assert scene.events == [failed]
    scene.loop.close()
    assert scene.transport.closed
    assert scene.events == [failed, orders.PullSettled(7)]


def test_a_message_that_raises_is_dropped_and_the_next_one_is_handled(
    scene: LoopScene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ClusterKey, "seal_error", bug)
    scene.send_to_listener(orders.ReaderDone(5, "r"), key="secret")
    scene.loop.run_round()
    assert scene.events == []
    assert [record.exc_info is not None for record in caplog.records] == [True]
    monkeypatch.undo()
    scene.send_to_listener(orders.ReaderHeartbeat(5), key="secret")
    scene.loop.run_round()
    assert scene.events == [orders.ReaderHeartbeat(5)]


def test_a_worker_whose_answer_raises_is_lost_and_its_pull_fails(
    scene: LoopScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peer, "_check_first_read", bug)
    scene.order(order(ticket_at(NOWHERE), 7))
    scene.loop.run_round()
    (failed,) = scene.events
    assert isinstance(failed, orders.PullFailed) and (failed.kind, failed.settled) == (FailureKind.REFUSED, True)
    assert "ZeroDivisionError('a bug')" in failed.message


def test_memory_is_deregistered_once_no_read_runs(scene: LoopScene) -> None:
    running = ScriptedRead(8, 1, ReadState.RUNNING)
    scene.transport.reads.append(running)
    deregister = orders.DeregisterMemory(Future())
    scene.order(deregister)
    assert scene.loop.run_round() == POLL_MS
    assert not deregister.done.done()
    running.state = ReadState.DONE
    assert scene.loop.run_round() is FOR_EVER
    assert deregister.done.result(0) and scene.transport.deregistered


def test_memory_stays_registered_if_a_read_does_not_end(scene: LoopScene) -> None:
    scene.transport.reads.append(ScriptedRead(8, 1, ReadState.RUNNING))
    deregister = orders.DeregisterMemory(Future())
    scene.order(deregister)
    scene.loop.run_round()
    scene.clock.now_s += DEREGISTER_TIMEOUT_S
    assert scene.loop.run_round() is FOR_EVER
    assert not deregister.done.result(0)


def test_a_reader_gets_the_new_description_after_memory_was_registered_again(scene: LoopScene) -> None:
    scene.order(orders.DeregisterMemory(Future()))
    scene.loop.run_round()
    register = orders.RegisterMemory(Future())
    scene.order(register)
    register.done.result(0)
    assert scene.loop.listener.welcome == side_channel.Welcome("p", b"p 2", MEMORY)


def test_a_failed_registration_raises_in_the_thread_that_ordered_it(
    scene: LoopScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no memory")

    monkeypatch.setattr(scene.transport, "register_blocks", fail)
    register = orders.RegisterMemory(Future())
    scene.order(register)
    with pytest.raises(TransferError, match="no memory"):
        register.done.result(0)
