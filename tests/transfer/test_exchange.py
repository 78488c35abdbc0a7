"""How long the transfer thread may sleep: the clock goes when the test says so."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import zmq

from motet.transfer import channel
from motet.transfer.base import News, ReaderDone
from motet.transfer.channel import Hello, Waits, Welcome
from motet.transfer.cluster_key import ClusterKey
from motet.transfer.door import Door, endpoint, listen
from motet.transfer.exchange import ATTEND_FOR_S, BRISK_MS, Exchange, ExchangeTerms
from motet.transfer.line import Lines
from motet.transfer.orders import Abandon, Expect, Fetch, GiveBack, Hold
from motet.transfer.peer import Caller
from motet.transfer.peers import Peers
from motet.transfer.ticket import TransferAddress
from tests.transfer.clock import Clock
from tests.transfer.scripted import FACTS, MEMORY, ScriptedTransport, Wires
from tests.transfer.worker import order, ticket_at

PATIENCE_MS = 10_000
FOR_EVER = None


@dataclass
class Desk:
    """An exchange that the test turns by hand."""

    exchange: Exchange
    transport: ScriptedTransport
    clock: Clock
    listening: "zmq.Socket[bytes]"
    visitor: "zmq.Socket[bytes]"
    news: list[News] = field(default_factory=list)

    def comes(self, question: channel.Question, key: str = "") -> None:
        """Somebody says this at the door."""
        self.visitor.send(channel.written(question, ClusterKey(key), channel.new_nonce()))
        assert self.listening.poll(PATIENCE_MS)


@pytest.fixture
def desk() -> Iterator[Desk]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clock, key = Clock(), ClusterKey("secret")
    transport = ScriptedTransport("p", Wires())
    listening, _, port = listen(context, "127.0.0.1", 0)
    visitor = context.socket(zmq.DEALER)
    visitor.connect(endpoint("127.0.0.1", port))
    news: list[News] = []
    exchange = Exchange(
        ExchangeTerms("p", pull_timeout_s=10.0, answer_s=2.0),
        Door(listening, key, FACTS, Welcome("p", b"p", MEMORY)),
        Peers(Lines(context, zmq.Poller(), key), Caller(FACTS, 2.0, clock), transport),
        transport,
        tell=news.append,
        clock=clock,
    )
    yield Desk(exchange, transport, clock, listening, visitor, news)
    exchange.close()
    context.destroy(linger=0)


NOBODY = TransferAddress("nobody", "127.0.0.1", 1)


def test_with_nothing_to_do_it_may_sleep_for_ever_and_leaves_the_transport_alone(desk: Desk) -> None:
    assert desk.exchange.round() is FOR_EVER
    assert desk.transport.polls == 0


def test_while_it_holds_leases_it_polls_every_millisecond(desk: Desk) -> None:
    desk.exchange.obey(Hold(2))
    assert desk.exchange.round() == BRISK_MS
    assert desk.transport.polls == 1
    desk.exchange.obey(Hold(0))
    assert desk.exchange.round() is FOR_EVER


@pytest.mark.parametrize("question", [Hello("p", FACTS), Waits(5)])
def test_who_comes_to_the_door_is_attended_to_for_two_seconds(desk: Desk, question: channel.Question) -> None:
    desk.comes(question, key="secret")
    assert desk.exchange.round() == BRISK_MS
    desk.clock.now_s += ATTEND_FOR_S - 0.1
    assert desk.exchange.round() == BRISK_MS
    assert desk.transport.polls == 2
    desk.clock.now_s += 0.1
    assert desk.exchange.round() is FOR_EVER


def test_who_has_not_the_cluster_key_is_not_attended_to(desk: Desk) -> None:
    desk.comes(Hello("p", FACTS), key="other")
    assert desk.exchange.round() is FOR_EVER


def test_a_pull_is_looked_at_every_millisecond_until_it_has_ended(desk: Desk) -> None:
    desk.exchange.obey(Fetch(order(ticket_at(NOBODY)), desk.clock.now_s))
    assert desk.exchange.round() == BRISK_MS
    desk.exchange.obey(Abandon(1))
    assert desk.exchange.round() == BRISK_MS  # the worker may still answer
    desk.clock.now_s += 2.0
    assert desk.exchange.round() is FOR_EVER


def test_between_two_heartbeats_it_sleeps(desk: Desk) -> None:
    ticket = ticket_at(NOBODY, lease_s=60.0)
    desk.exchange.obey(Expect(ticket))
    assert desk.exchange.round() == BRISK_MS  # the worker is asked
    desk.clock.now_s += 2.0
    assert desk.exchange.round() == 18_000
    desk.clock.now_s += 17.9995
    assert desk.exchange.round() == 1
    desk.clock.now_s = math.ceil(desk.clock.now_s)
    assert desk.exchange.round() == BRISK_MS  # it is asked again
    desk.exchange.obey(GiveBack(ticket))
    desk.clock.now_s += 2.0
    assert desk.exchange.round() is FOR_EVER


def test_a_notification_that_is_junk_is_dropped(desk: Desk) -> None:
    desk.transport.inbox = [b"junk", channel.notification(channel.Release(5, "r"))]
    desk.exchange.obey(Hold(1))
    desk.exchange.round()
    assert desk.news == [ReaderDone(5, "r")]
