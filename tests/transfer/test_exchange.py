"""The transfer thread sleeps as long as it may, and an order that raises fails alone. The test sets the clock."""

import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import pytest
import zmq

from motet.transfer import orders, side_channel
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.peer import Peer, Peers, ReaderTerms
from motet.transfer.thread import ATTEND_FOR_S, BRISK_MS, WITHDRAW_S, Exchange
from motet.transfer.ticket import ClusterKey, TransferAddress
from motet.transfer.transport import ReadState
from tests.transfer.scripted import FACTS, MEMORY, Clock, ScriptedRead, ScriptedTransport, Wires
from tests.transfer.worker import order, ticket_at

PATIENCE_MS = 10_000
FOR_EVER = None


@dataclass
class Desk:
    """An exchange whose rounds the test plays by hand."""

    exchange: Exchange
    peers: Peers
    transport: ScriptedTransport
    clock: Clock
    listening: "zmq.Socket[bytes]"
    reader: "zmq.Socket[bytes]"
    news: list[orders.News] = field(default_factory=list)

    def order(self, order: orders.Order) -> None:
        self.exchange.obey(order, self.clock.now_s)

    def send_to_listener(self, message: side_channel.ChannelRequest, key: str = "") -> None:
        """Sends a message to the listener, as a reader does."""
        self.reader.send(side_channel.encode(message, ClusterKey(key), nonce=side_channel.new_nonce()))
        assert self.listening.poll(PATIENCE_MS)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(side_channel, "LINGER_MS", 0)  # no last message of these tests has a reader
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clock, key = Clock(), ClusterKey("secret")
    transport = ScriptedTransport("p", Wires())
    listening, _, port = side_channel.listen("127.0.0.1", 0, context=context)
    reader = context.socket(zmq.DEALER)
    reader.connect(side_channel.endpoint("127.0.0.1", port))
    news: list[orders.News] = []
    poller = zmq.Poller()
    peers = Peers(
        lambda address: side_channel.SideChannelClient(address, context, poller=poller, key=key),
        ReaderTerms(FACTS, 2.0, clock),
        transport,
    )
    exchange = Exchange(
        engine_id="p",
        listener=side_channel.SideChannelListener(listening, key, FACTS, side_channel.Welcome("p", b"p", MEMORY)),
        peers=peers,
        transport=transport,
        pull_timeout_s=10.0,
        answer_s=2.0,
        tell=news.append,
        clock=clock,
    )
    yield Desk(exchange, peers, transport, clock, listening, reader, news)
    exchange.close()
    context.destroy(linger=0)


NOBODY = TransferAddress("nobody", "127.0.0.1", 1)


def test_an_idle_thread_can_sleep_forever_and_does_not_poll_the_transport(desk: Desk) -> None:
    assert desk.exchange.round() is FOR_EVER
    assert desk.transport.polls == 0


def test_while_leases_are_held_the_transport_is_polled_every_millisecond(desk: Desk) -> None:
    desk.order(orders.LeasesHeld(2))
    assert desk.exchange.round() == BRISK_MS
    assert desk.transport.polls == 1
    desk.order(orders.LeasesHeld(0))
    assert desk.exchange.round() is FOR_EVER


@pytest.mark.parametrize("message", [side_channel.Hello("p", FACTS), orders.ReaderWaits(5)])
def test_after_a_message_from_a_reader_the_transport_is_polled_for_two_seconds(
    desk: Desk, message: side_channel.ChannelRequest
) -> None:
    desk.send_to_listener(message, key="secret")
    assert desk.exchange.round() == BRISK_MS
    desk.clock.now_s += ATTEND_FOR_S - 0.1
    assert desk.exchange.round() == BRISK_MS
    assert desk.transport.polls == 2
    desk.clock.now_s += 0.1
    assert desk.exchange.round() is FOR_EVER


def test_a_message_without_the_cluster_key_does_not_start_polling(desk: Desk) -> None:
    desk.send_to_listener(side_channel.Hello("p", FACTS), key="other")
    assert desk.exchange.round() is FOR_EVER


def test_a_pull_is_looked_at_every_millisecond_until_it_has_ended(desk: Desk) -> None:
    desk.order(order(ticket_at(NOBODY)))
    assert desk.exchange.round() == BRISK_MS
    desk.order(orders.AbandonPull(1))
    assert desk.exchange.round() == BRISK_MS  # the worker may still answer
    desk.clock.now_s += 2.0
    assert desk.exchange.round() is FOR_EVER


def test_the_thread_sleeps_between_two_heartbeats(desk: Desk) -> None:
    ticket = ticket_at(NOBODY, lease_s=60.0)
    desk.order(orders.KeepAlive(ticket))
    assert desk.exchange.round() == BRISK_MS  # the worker is asked
    desk.clock.now_s += 2.0
    assert desk.exchange.round() == 18_000
    desk.clock.now_s += 17.9995
    assert desk.exchange.round() == 1
    desk.clock.now_s = math.ceil(desk.clock.now_s)
    assert desk.exchange.round() == BRISK_MS  # it is asked again
    desk.order(orders.ReleaseTicket(ticket))
    desk.clock.now_s += 2.0
    assert desk.exchange.round() is FOR_EVER


def test_a_notification_that_cannot_be_read_is_dropped(desk: Desk) -> None:
    desk.transport.inbox = [b"junk", msgspec.msgpack.encode(orders.ReaderDone(5, "r"))]
    desk.order(orders.LeasesHeld(1))
    desk.exchange.round()
    assert desk.news == [orders.ReaderDone(5, "r")]


def bug(*_: object) -> NoReturn:
    """Raises an error that nobody expects."""
    raise ZeroDivisionError("a bug")


def test_an_order_that_raises_fails_alone_and_the_next_one_is_followed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(desk.peers, "at", bug)
    desk.order(order(ticket_at(NOBODY), 7))
    desk.order(orders.MeetWorker(8, NOBODY))
    desk.order(orders.ReleaseTicket(ticket_at(NOBODY)))
    desk.order(orders.KeepAlive(ticket_at(NOBODY)))
    desk.exchange.round()  # a heartbeat is due
    pulled, met = desk.news
    assert isinstance(pulled, orders.PullFailed) and (pulled.number, pulled.settled) == (7, True)
    assert isinstance(met, orders.Met) and met.number == 8 and met.error is not None
    assert "ZeroDivisionError('a bug')" in pulled.message and "ZeroDivisionError('a bug')" in met.error.message
    assert len([record for record in caplog.records if record.exc_info]) == 4, "each with its traceback"
    monkeypatch.undo()
    desk.order(order(ticket_at(NOBODY), 9))
    desk.order(orders.AbandonPull(9))
    assert desk.news[2:] == [orders.PullSettled(9)]


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
def test_a_wrong_address_fails_only_the_order_that_has_it(desk: Desk, changes: dict[str, object]) -> None:
    wrong = msgspec.structs.replace(NOBODY, **changes)
    ticket = msgspec.structs.replace(
        ticket_at(NOBODY), remote_engine_id=wrong.engine_id, remote_host=wrong.host, remote_port=wrong.port
    )
    for one in (orders.KeepAlive(ticket), order(ticket, 7), orders.MeetWorker(8, wrong), orders.ReleaseTicket(ticket)):
        desk.order(one)
        desk.exchange.round()
    desk.clock.now_s += 60.0
    desk.exchange.round()
    assert {type(news) for news in desk.news} == {orders.PullFailed, orders.Met}
    desk.order(order(ticket_at(NOBODY), 9))
    desk.order(orders.AbandonPull(9))
    assert desk.news[2:] == [orders.PullSettled(9)]


def test_a_pull_that_raises_fails_alone_and_holds_its_blocks_until_the_close(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peer, "waits", bug)
    desk.order(order(ticket_at(NOBODY), 7))
    desk.exchange.round()
    (failed,) = desk.news
    assert isinstance(failed, orders.PullFailed) and (failed.number, failed.settled) == (7, False)
    desk.order(orders.AbandonPull(7))
    desk.exchange.round()
    assert desk.news == [failed]
    desk.exchange.close()
    assert desk.transport.closed
    assert desk.news == [failed, orders.PullSettled(7)]


def test_a_message_that_raises_is_dropped_and_the_next_one_is_heard(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ClusterKey, "complaint", bug)
    desk.send_to_listener(orders.ReaderDone(5, "r"), key="secret")
    desk.exchange.round()
    assert desk.news == []
    assert [record.exc_info is not None for record in caplog.records] == [True]
    monkeypatch.undo()
    desk.send_to_listener(orders.ReaderWaits(5), key="secret")
    desk.exchange.round()
    assert desk.news == [orders.ReaderWaits(5)]


def test_a_worker_whose_answer_raises_is_gone_and_its_pull_fails(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "_look_at_wiring", bug)
    desk.order(order(ticket_at(NOBODY), 7))
    desk.exchange.round()
    (failed,) = desk.news
    assert isinstance(failed, orders.PullFailed) and (failed.kind, failed.settled) == (FailureKind.REFUSED, True)
    assert "ZeroDivisionError('a bug')" in failed.message


def test_memory_is_withdrawn_when_no_read_runs_any_more(desk: Desk) -> None:
    running = ScriptedRead(8, 1, ReadState.RUNNING)
    desk.transport.reads.append(running)
    withdraw = orders.Withdraw(Future())
    desk.order(withdraw)
    assert desk.exchange.round() == BRISK_MS
    assert not withdraw.done.done()
    running.state = ReadState.DONE
    assert desk.exchange.round() is FOR_EVER
    assert withdraw.done.result(0) and desk.transport.withdrawn


def test_memory_stays_known_if_a_read_does_not_end(desk: Desk) -> None:
    desk.transport.reads.append(ScriptedRead(8, 1, ReadState.RUNNING))
    withdraw = orders.Withdraw(Future())
    desk.order(withdraw)
    desk.exchange.round()
    desk.clock.now_s += WITHDRAW_S
    assert desk.exchange.round() is FOR_EVER
    assert not withdraw.done.result(0)


def test_a_reader_that_comes_after_memory_was_offered_again_gets_its_new_description(desk: Desk) -> None:
    desk.order(orders.Withdraw(Future()))
    desk.exchange.round()
    offer = orders.AdvertiseMemory(Future())
    desk.order(offer)
    offer.done.result(0)
    assert desk.exchange.listener.welcome == side_channel.Welcome("p", b"p 2", MEMORY)


def test_memory_that_cannot_be_offered_is_told_to_whoever_ordered_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no memory")

    monkeypatch.setattr(desk.transport, "offer", fail)
    offer = orders.AdvertiseMemory(Future())
    desk.order(offer)
    with pytest.raises(TransferError, match="no memory"):
        offer.done.result(0)
