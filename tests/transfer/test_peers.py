"""Which workers are known: real lines, a clock that goes when the test says so."""

from collections.abc import Iterator

import pytest
import zmq

from motet.transfer.base import FailureKind, TransferError
from motet.transfer.channel import Welcome
from motet.transfer.cluster_key import ClusterKey
from motet.transfer.door import Door, listen
from motet.transfer.line import Lines
from motet.transfer.peer import Caller, Peer, PeerState
from motet.transfer.peers import SILENT_S, Peers
from motet.transfer.ticket import TransferAddress
from tests.transfer.clock import Clock
from tests.transfer.scripted import FACTS, MEMORY, ScriptedTransport, Wires

ANSWER_S = 2.0
PATIENCE_MS = 10_000
KEY = ClusterKey("")


class Owner:
    """The door of a worker."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", name: str, wires: Wires) -> None:
        ScriptedTransport(name, wires)
        self.listening, _, port = listen(context, "127.0.0.1", 0)
        self.address = TransferAddress(name, "127.0.0.1", port)
        self.door = Door(self.listening, KEY, FACTS, Welcome(name, name.encode(), MEMORY))


class Reader:
    """The peers of a worker, and the others that there are."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clock = Clock()
        self.poller = zmq.Poller()
        self.wires = Wires()
        self.transport = ScriptedTransport("d", self.wires)
        self.peers = Peers(Lines(self.context, self.poller, KEY), Caller(FACTS, ANSWER_S, self.clock), self.transport)
        self.owners = [Owner(self.context, name, self.wires) for name in ("p1", "p2", "p3")]

    def meet(self, owner: Owner) -> Peer:
        peer = self.peers.at(owner.address)
        self.answer(owner)
        return peer

    def answer(self, owner: Owner) -> None:
        assert owner.listening.poll(PATIENCE_MS)
        owner.door.visits()
        assert self.poller.poll(PATIENCE_MS)
        self.peers.advance()

    def close(self) -> None:
        self.peers.close()
        self.context.destroy(linger=0)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


def test_a_worker_is_one_peer_however_often_it_is_wanted(reader: Reader) -> None:
    owner = reader.owners[0]
    peer = reader.meet(owner)
    assert reader.peers.at(owner.address) is peer
    assert reader.transport.connected == ["p1"]


def test_one_that_is_gone_is_asked_anew(reader: Reader) -> None:
    owner = reader.owners[0]
    peer = reader.meet(owner)
    peer.lose("lost", FailureKind.PEER_LOST)
    again = reader.meet(owner)
    assert again is not peer
    assert again.state is PeerState.MET
    assert reader.transport.connected == ["p1"]


def test_a_worker_that_went_is_noticed_when_another_one_comes(reader: Reader) -> None:
    gone, alive, new = reader.owners
    gone_peer, alive_peer = reader.meet(gone), reader.meet(alive)
    reader.clock.now_s += SILENT_S
    reader.meet(new)
    assert gone.listening.poll(PATIENCE_MS)  # it is asked, and does not answer
    reader.answer(alive)
    reader.clock.now_s += ANSWER_S
    reader.peers.advance()
    assert (gone_peer.state, alive_peer.state) == (PeerState.GONE, PeerState.MET)
    assert reader.transport.connected == ["p2", "p3"]


def test_workers_heard_of_lately_are_not_asked_when_another_one_comes(reader: Reader) -> None:
    first, second, _ = reader.owners
    reader.meet(first)
    reader.clock.now_s += SILENT_S - 1.0
    reader.meet(second)
    reader.clock.now_s += ANSWER_S
    reader.peers.advance()
    assert reader.transport.connected == ["p1", "p2"]


def test_what_can_be_no_address_leaves_nothing_behind(reader: Reader) -> None:
    with pytest.raises(TransferError):
        reader.peers.at(TransferAddress("p", "no host", 1))
    assert reader.poller.sockets == []
    assert not reader.peers.busy
