"""A pull until it lands or fails by what the other side does."""

import msgspec
import pytest

from motet.transfer import channel
from motet.transfer.base import Failed, FailureKind, Landed
from motet.transfer.channel import Answer, Refused, Release, SomeoneElse, Welcome
from motet.transfer.layout import Run
from motet.transfer.peer import PeerState
from motet.transfer.pull import Pull, PullTerms
from tests.transfer.scene import ANSWER_S, FAILED, RUNNING, TICKET, TIMEOUT_S, Scene
from tests.transfer.scripted import MEMORY, NUM_BLOCKS, NUM_SLOTS
from tests.transfer.worker import LEASE_ID, LEASE_SLOT, order


def test_a_pull_that_finds_its_peer_reads_proves_acknowledges_and_lands() -> None:
    scene = Scene()
    assert scene.step() == []  # nobody answered yet
    [landed] = scene.welcomed().step(after_s=0.5)
    assert landed == Landed(1, num_bytes=3 * 64, num_descriptors=2, seconds=0.5, post_seconds=0.0)
    assert scene.reader.runs == [Run(3, 0, 2), Run(7, 2, 1)]
    assert scene.owner.inbox == [channel.notification(Release(LEASE_ID, "d:1"))]
    assert not scene.released
    scene.check_over()


def test_the_proof_is_read_after_the_data_and_not_before() -> None:
    scene = Scene().reading()
    data = scene.open_reads()
    assert len(data) == 1
    posted = len(scene.reader.reads)
    assert scene.step() == []
    assert len(scene.reader.reads) == posted
    scene.owner.shows[4] += 1  # the block is given to someone else while its data is read
    scene.end_reads()
    [failed] = scene.step()
    assert failed == Failed(
        1, FailureKind.STALE, "blocks at the worker at 127.0.0.1:5 had been given to someone else", True
    )
    assert scene.released
    assert scene.owner.inbox == []
    scene.check_over()


def test_a_lease_that_is_over_fails_the_pull_even_if_the_blocks_are_untouched() -> None:
    scene = Scene().welcomed()
    scene.owner.shows[NUM_BLOCKS + LEASE_SLOT] = 0
    [failed] = scene.step()
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.settled) == (FailureKind.LEASE_ENDED, True)
    scene.check_over()


def test_a_lease_slot_that_another_lease_has_fails_the_pull() -> None:
    scene = Scene().welcomed()
    scene.owner.shows[NUM_BLOCKS + LEASE_SLOT] = TICKET.digest + 1
    [failed] = scene.step()
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.LEASE_ENDED


def test_a_ticket_that_says_something_else_than_the_one_that_was_granted_fails_the_pull() -> None:
    scene = Scene()
    altered = msgspec.structs.replace(TICKET, prompt_digest="of a prompt of somebody else's")
    scene.pull = Pull(order(altered), scene.peer, PullTerms("d:1", scene.clock.now_s, TIMEOUT_S), scene.clock)
    [failed] = scene.welcomed().step()
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.settled) == (FailureKind.LEASE_ENDED, True)
    scene.check_over()


def test_a_peer_that_does_not_answer_is_unreachable() -> None:
    scene = Scene()
    assert scene.step(after_s=ANSWER_S - 0.1) == []
    [failed] = scene.step(after_s=0.1)
    assert failed == Failed(1, FailureKind.UNREACHABLE, "the worker at 127.0.0.1:5 does not answer", True)
    assert scene.line.closed


@pytest.mark.parametrize("answer", [SomeoneElse("p2"), Welcome("p2", b"p", MEMORY)])
def test_another_start_of_the_worker_is_restarted(answer: Answer) -> None:
    scene = Scene()
    scene.line.coming.append(answer)
    [failed] = scene.step()
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.settled) == (FailureKind.RESTARTED, True)
    assert scene.reader.connected == []


def test_a_refusal_fails_at_once_with_its_reason() -> None:
    scene = Scene()
    scene.line.coming.append(Refused("dtype is bfloat16 here and float32 there"))
    [failed] = scene.step()
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.REFUSED
    assert "dtype is bfloat16 here and float32 there" in failed.message


def test_a_peer_that_the_transport_cannot_connect_to_fails_the_pull() -> None:
    scene = Scene()
    scene.line.coming.append(Welcome("p", b"nobody", MEMORY))
    [failed] = scene.step()
    assert failed == Failed(1, FailureKind.PEER_LOST, "no such end", True)
    assert scene.line.closed


def test_an_answer_to_an_earlier_question_is_ignored() -> None:
    scene = Scene()
    scene.line.coming.append(Welcome("p", b"p", MEMORY))
    scene.line.nonce = b"of another question"
    assert scene.step() == []
    assert scene.peer.state is PeerState.ASKING


def test_a_read_that_breaks_loses_the_peer() -> None:
    scene = Scene().reading()
    scene.end_reads(FAILED)
    [failed] = scene.step()
    assert failed == Failed(1, FailureKind.PEER_LOST, "the connection to the worker at 127.0.0.1:5 broke", True)
    assert (scene.peer.state, scene.peer.closed, scene.reader.connected) == (PeerState.GONE, True, [])
    scene.check_over()


def test_a_proof_that_breaks_loses_the_peer() -> None:
    scene = Scene().proving()
    scene.end_reads(FAILED)
    [failed] = scene.step()
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.settled) == (FailureKind.PEER_LOST, True)
    scene.check_over()


def test_a_read_that_cannot_be_posted_loses_the_peer() -> None:
    scene = Scene().welcomed()
    scene.reader.wiring = RUNNING
    scene.peer.advance()
    scene.reader.posts = False
    [failed] = scene.step()
    assert failed == Failed(1, FailureKind.PEER_LOST, "cannot be posted", True)
    assert (scene.peer.state, scene.peer.closed) == (PeerState.GONE, False)  # the wiring read still runs
    scene.end_reads()
    scene.step()
    assert scene.peer.closed
    scene.check_over()


def test_a_proof_that_cannot_be_posted_fails_settled_because_the_data_is_no_longer_written() -> None:
    scene = Scene().reading()
    scene.reader.posts = False
    scene.end_reads()
    [failed] = scene.step()
    assert failed == Failed(1, FailureKind.PEER_LOST, "cannot be posted", True)
    scene.check_over()


@pytest.mark.parametrize(
    "changes",
    [{"remote_block_ids": (3, 4, NUM_BLOCKS)}, {"lease_slot": NUM_SLOTS}],
)
def test_a_ticket_that_names_what_the_worker_does_not_have_is_refused_before_anything_is_read(
    changes: dict[str, object],
) -> None:
    scene = Scene()
    wrong = msgspec.structs.replace(TICKET, **changes)
    scene.pull = Pull(order(wrong), scene.peer, PullTerms("d:1", scene.clock.now_s, TIMEOUT_S), scene.clock)
    [failed] = scene.welcomed().step()
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.REFUSED
    assert scene.reader.runs == []
