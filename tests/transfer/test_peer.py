"""What a peer hears from its reader, and how it is found lost."""

from motet.transfer.base import FailureKind, Landed
from motet.transfer.channel import Attend, Waits
from motet.transfer.peer import PeerState
from motet.transfer.pull import WAITS_EVERY_S
from tests.transfer.scene import ANSWER_S, FAILED, RUNNING, TIMEOUT_S, Scene
from tests.transfer.worker import LEASE_ID


def test_the_lease_hears_of_a_pull_every_second_until_it_has_failed() -> None:
    scene = Scene().reading()
    assert scene.line.said.count(Waits(LEASE_ID)) == 1
    scene.step(after_s=WAITS_EVERY_S - 0.1)
    assert scene.line.said.count(Waits(LEASE_ID)) == 1
    scene.step(after_s=0.1)
    assert scene.line.said.count(Waits(LEASE_ID)) == 2
    scene.step(after_s=TIMEOUT_S)
    before = scene.line.said.count(Waits(LEASE_ID))
    scene.step(after_s=WAITS_EVERY_S)
    assert scene.line.said.count(Waits(LEASE_ID)) == before


def test_a_worker_is_told_to_poll_as_long_as_a_read_of_it_is_open() -> None:
    scene = Scene().reading()
    scene.step(after_s=TIMEOUT_S)
    before = scene.line.said.count(Attend())
    scene.step(after_s=1.0)
    scene.step(after_s=1.0)
    assert scene.line.said.count(Attend()) == before + 2
    scene.end_reads()
    scene.step()
    scene.step(after_s=5.0)
    assert scene.line.said.count(Attend()) == before + 2


def test_a_lost_peer_stays_connected_until_no_read_of_it_can_write() -> None:
    scene = Scene().reading()
    scene.peer.lose("lost", FailureKind.PEER_LOST)
    scene.step()
    assert scene.reader.connected == ["p"]
    scene.end_reads()
    [landed] = scene.step()  # it has come all the same, and proves true
    assert isinstance(landed, Landed)
    assert scene.reader.connected == []


def test_asked_again_a_peer_that_is_silent_is_lost_and_one_that_answers_stays() -> None:
    scene = Scene().welcomed()
    scene.step()
    ready = [scene.peer.ready]
    scene.peer.ask()
    ready.append(scene.peer.ready)
    scene.welcomed().step()
    ready.append(scene.peer.ready)
    assert ready == [True, False, True]
    scene.peer.ask()
    scene.step(after_s=ANSWER_S)
    assert scene.peer.state is PeerState.GONE


def test_the_first_read_is_made_when_the_worker_is_met_so_that_the_connection_is_wired() -> None:
    scene = Scene()
    scene.reader.wiring = RUNNING
    scene.welcomed().peer.advance()
    [wiring] = scene.open_reads()
    assert wiring.num_bytes == 8
    ready = [scene.peer.ready]
    scene.end_reads()
    scene.peer.advance()
    ready.append(scene.peer.ready)
    assert ready == [False, True]
    assert wiring.closed


def test_a_first_read_that_breaks_loses_the_peer() -> None:
    scene = Scene()
    scene.reader.wiring = FAILED
    scene.welcomed().peer.advance()
    assert scene.peer.error is not None
    assert scene.peer.error.kind is FailureKind.PEER_LOST
    assert scene.peer.closed
