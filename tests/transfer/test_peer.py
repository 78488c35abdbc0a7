"""A reader sends heartbeats to its peers, detects that a peer is lost, and keeps one peer for each worker."""

from collections.abc import Iterator

import pytest
import zmq

from motet.transfer.orders import FailureKind, PullLanded, ReaderHeartbeat, TransferError
from motet.transfer.peer import SILENCE_S, Peer, Peers, ReaderTerms
from motet.transfer.pull import HEARTBEAT_EVERY_S
from motet.transfer.side_channel import PollRequest, SideChannelClient, SideChannelListener, Welcome, listen
from motet.transfer.ticket import ClusterKey, TransferAddress
from tests.clock import Clock
from tests.transfer.pull_scene import ANSWER_S, FAILED, RUNNING, TIMEOUT_S, PullScene
from tests.transfer.scripted import FACTS, MEMORY, ScriptedTransport, Wires
from tests.transfer.worker import LEASE_ID


def test_a_pull_sends_a_heartbeat_every_second_until_it_has_failed() -> None:
    scene = PullScene().reading()
    assert scene.client.sent.count(ReaderHeartbeat(LEASE_ID)) == 1
    scene.step(after_s=HEARTBEAT_EVERY_S - 0.1)
    assert scene.client.sent.count(ReaderHeartbeat(LEASE_ID)) == 1
    scene.step(after_s=0.1)
    assert scene.client.sent.count(ReaderHeartbeat(LEASE_ID)) == 2
    scene.step(after_s=TIMEOUT_S)
    before = scene.client.sent.count(ReaderHeartbeat(LEASE_ID))
    scene.step(after_s=HEARTBEAT_EVERY_S)
    assert scene.client.sent.count(ReaderHeartbeat(LEASE_ID)) == before


def test_a_worker_is_requested_to_poll_while_a_read_from_it_is_open() -> None:
    scene = PullScene().reading()
    scene.step(after_s=TIMEOUT_S)
    before = scene.client.sent.count(PollRequest())
    scene.step(after_s=1.0)
    scene.step(after_s=1.0)
    assert scene.client.sent.count(PollRequest()) == before + 2
    scene.end_reads()
    scene.step()
    scene.step(after_s=5.0)
    assert scene.client.sent.count(PollRequest()) == before + 2


def test_a_lost_peer_stays_connected_until_all_reads_from_it_are_final() -> None:
    scene = PullScene().reading()
    scene.peer.mark_lost("lost", FailureKind.PEER_LOST)
    scene.step()
    assert scene.reader.connected == ["p"]
    scene.end_reads()
    [landed] = scene.step()  # the data has arrived all the same, and the proof matches
    assert isinstance(landed, PullLanded)
    assert scene.reader.connected == []


def test_a_peer_that_is_sent_hello_again_stays_if_it_answers_and_is_lost_if_not() -> None:
    scene = PullScene().welcomed()
    scene.step()
    ready = [scene.peer.ready]
    scene.peer.channel.send_hello()
    ready.append(scene.peer.ready)
    scene.welcomed().step()
    ready.append(scene.peer.ready)
    assert ready == [True, False, True]
    scene.peer.channel.send_hello()
    scene.step(after_s=ANSWER_S)
    assert scene.peer.error is not None


def test_the_first_read_follows_the_welcome_and_sets_up_the_connection() -> None:
    scene = PullScene()
    scene.reader.first_read_state = RUNNING
    scene.welcomed().peer.advance()
    [first_read] = scene.open_reads()
    assert first_read.num_bytes == 8
    ready = [scene.peer.ready]
    scene.end_reads()
    scene.peer.advance()
    ready.append(scene.peer.ready)
    assert ready == [False, True]
    assert first_read.closed


def test_a_first_read_that_breaks_loses_the_peer() -> None:
    scene = PullScene()
    scene.reader.first_read_state = FAILED
    scene.welcomed().peer.advance()
    assert scene.peer.error is not None
    assert scene.peer.error.kind is FailureKind.PEER_LOST
    assert scene.peer.closed


PATIENCE_MS = 10_000
KEY = ClusterKey("")


class Owner:
    """A worker that is read from: its listener and its address."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", name: str, wires: Wires) -> None:
        ScriptedTransport(name, wires)
        self.listening, _, port = listen("127.0.0.1", 0, context=context)
        self.address = TransferAddress(name, "127.0.0.1", port)
        self.listener = SideChannelListener(self.listening, KEY, FACTS, Welcome(name, name.encode(), MEMORY))


class ReadingWorker:
    """A worker's peers, and the workers that can become its peers."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clock = Clock()
        self.poller = zmq.Poller()
        self.wires = Wires()
        self.transport = ScriptedTransport("d", self.wires)
        self.peers = Peers(
            lambda address: SideChannelClient(address, self.context, poller=self.poller, key=KEY),
            ReaderTerms(FACTS, ANSWER_S, self.clock),
            self.transport,
        )
        self.owners = [Owner(self.context, name, self.wires) for name in ("p1", "p2", "p3")]

    def connect(self, owner: Owner) -> Peer:
        peer = self.peers.at(owner.address)
        self.answer(owner)
        return peer

    def answer(self, owner: Owner) -> None:
        assert owner.listening.poll(PATIENCE_MS)
        owner.listener.receive(lambda event: None)
        assert self.poller.poll(PATIENCE_MS)
        self.peers.advance()

    def close(self) -> None:
        self.peers.close()
        self.context.destroy(linger=0)


@pytest.fixture
def reader() -> Iterator[ReadingWorker]:
    reader = ReadingWorker()
    yield reader
    reader.close()


def test_repeated_requests_for_a_worker_return_one_peer(reader: ReadingWorker) -> None:
    owner = reader.owners[0]
    peer = reader.connect(owner)
    assert reader.peers.at(owner.address) is peer
    assert reader.transport.connected == ["p1"]


def test_a_lost_worker_is_connected_again(reader: ReadingWorker) -> None:
    owner = reader.owners[0]
    peer = reader.connect(owner)
    peer.mark_lost("lost", FailureKind.PEER_LOST)
    again = reader.connect(owner)
    assert again is not peer
    assert again.connection is not None and again.connection.memory == MEMORY
    assert reader.transport.connected == ["p1"]


def test_a_worker_silent_for_a_minute_is_lost_when_another_one_is_connected(reader: ReadingWorker) -> None:
    """The time was ten minutes, during which a decode engine kept sockets to prefill engines of its cell that had
    died."""
    gone, alive, new = reader.owners
    gone_peer, alive_peer = reader.connect(gone), reader.connect(alive)
    reader.clock.now_s += 60.0
    reader.connect(new)
    assert gone.listening.poll(PATIENCE_MS)  # it is sent a Hello, and does not answer
    reader.answer(alive)
    reader.clock.now_s += ANSWER_S
    reader.peers.advance()
    assert gone_peer.error is not None and alive_peer.error is None
    assert reader.transport.connected == ["p2", "p3"]


def test_workers_that_answered_recently_are_sent_no_hello_when_another_is_connected(reader: ReadingWorker) -> None:
    first, second, _ = reader.owners
    reader.connect(first)
    reader.clock.now_s += SILENCE_S - 1.0
    reader.connect(second)
    reader.clock.now_s += ANSWER_S
    reader.peers.advance()
    assert reader.transport.connected == ["p1", "p2"]


def test_an_invalid_address_leaves_no_socket_and_no_peer(reader: ReadingWorker) -> None:
    with pytest.raises(TransferError):
        reader.peers.at(TransferAddress("p", "no host", 1))
    assert reader.poller.sockets == []
    assert not reader.peers.busy
