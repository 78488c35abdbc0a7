"""A pull from its order to its end: it lands, fails, times out, is abandoned or closed."""

import msgspec
import pytest

from motet.transfer.orders import FailureKind, PullFailed, PullLanded, PullSettled, ReaderDone
from motet.transfer.side_channel import ChannelReply, Refused, Welcome, WrongStart
from motet.transfer.transport import BlockRun
from tests.transfer.pull_scene import ANSWER_S, DONE, FAILED, RUNNING, TICKET, TIMEOUT_S, PullScene
from tests.transfer.scripted import MEMORY, NUM_BLOCKS, NUM_SLOTS
from tests.transfer.worker import LEASE_ID, LEASE_SLOT, PullFailure, failure


def test_a_pull_whose_peer_answers_reads_proves_acknowledges_and_lands() -> None:
    scene = PullScene()
    assert scene.step() == []  # the peer has not answered yet
    [landed] = scene.welcomed().step(after_s=0.5)
    assert landed == PullLanded(1, num_bytes=3 * 64, num_descriptors=2, seconds=0.5, post_seconds=0.0)
    assert scene.reader.runs == [BlockRun(3, 0, 2), BlockRun(7, 2, 1)]
    assert scene.owner.inbox == [msgspec.msgpack.encode(ReaderDone(LEASE_ID, "d:1"))]
    assert not scene.released
    scene.check_over()


def test_the_proof_is_read_after_the_data_and_not_before() -> None:
    scene = PullScene().reading()
    data = scene.open_reads()
    assert len(data) == 1
    posted = len(scene.reader.reads)
    assert scene.step() == []
    assert len(scene.reader.reads) == posted
    scene.owner.proof_entries[4] += 1  # the block is reused while its data is read
    scene.end_reads()
    [failed] = scene.step()
    assert failed == PullFailed(
        1, FailureKind.STALE, "blocks at the worker at 127.0.0.1:5 were reused before the data was read", True
    )
    assert scene.released
    assert scene.owner.inbox == []
    scene.check_over()


@pytest.mark.parametrize("slot", [0, TICKET.digest + 1], ids=["empty", "of another lease"])
def test_a_lease_that_has_ended_fails_the_pull_even_if_the_blocks_are_unchanged(slot: int) -> None:
    scene = PullScene().welcomed()
    scene.owner.proof_entries[NUM_BLOCKS + LEASE_SLOT] = slot
    assert failure(*scene.step()) == PullFailure(kind=FailureKind.LEASE_ENDED, settled=True)
    scene.check_over()


def test_a_ticket_that_differs_from_the_granted_one_fails_the_pull() -> None:
    scene = PullScene()
    altered = msgspec.structs.replace(TICKET, prompt_digest="of another client's prompt")
    scene.pull = scene.make_pull(ticket=altered)
    assert failure(*scene.welcomed().step()) == PullFailure(kind=FailureKind.LEASE_ENDED, settled=True)
    scene.check_over()


def test_a_peer_that_does_not_answer_is_unreachable() -> None:
    scene = PullScene()
    assert scene.step(after_s=ANSWER_S - 0.1) == []
    [failed] = scene.step(after_s=0.1)
    assert failed == PullFailed(1, FailureKind.UNREACHABLE, "the worker at 127.0.0.1:5 does not answer", True)
    assert scene.client.closed


@pytest.mark.parametrize("answer", [WrongStart("p2"), Welcome("p2", b"p", MEMORY)])
def test_an_answer_from_another_start_of_the_worker_fails_the_pull_as_restarted(answer: ChannelReply) -> None:
    scene = PullScene()
    scene.client.incoming.append(answer)
    assert failure(*scene.step()) == PullFailure(kind=FailureKind.RESTARTED, settled=True)
    assert scene.reader.connected == []


def test_a_refusal_fails_at_once_with_its_reason() -> None:
    scene = PullScene()
    scene.client.incoming.append(Refused("dtype is bfloat16 here and float32 there"))
    [failed] = scene.step()
    assert isinstance(failed, PullFailed)
    assert failed.kind is FailureKind.REFUSED
    assert "dtype is bfloat16 here and float32 there" in failed.message


def test_a_peer_that_the_transport_cannot_connect_to_fails_the_pull() -> None:
    scene = PullScene()
    scene.client.incoming.append(Welcome("p", b"unknown", MEMORY))
    [failed] = scene.step()
    assert failed == PullFailed(1, FailureKind.PEER_LOST, "no such worker", True)
    assert scene.client.closed


def test_an_answer_to_an_earlier_hello_is_ignored() -> None:
    scene = PullScene()
    scene.client.incoming.append(Welcome("p", b"p", MEMORY))
    scene.client.nonce = b"of another hello"
    assert scene.step() == []
    assert (scene.peer.connection, scene.peer.error) == (None, None)


def test_a_read_that_breaks_loses_the_peer() -> None:
    scene = PullScene().reading()
    scene.end_reads(FAILED)
    [failed] = scene.step()
    assert failed == PullFailed(1, FailureKind.PEER_LOST, "the connection to the worker at 127.0.0.1:5 broke", True)
    assert (scene.peer.closed, scene.reader.connected) == (True, [])
    scene.check_over()


def test_a_proof_that_breaks_loses_the_peer() -> None:
    scene = PullScene().proving()
    scene.end_reads(FAILED)
    assert failure(*scene.step()) == PullFailure(kind=FailureKind.PEER_LOST, settled=True)
    scene.check_over()


def test_a_read_that_cannot_be_posted_loses_the_peer() -> None:
    scene = PullScene().welcomed()
    scene.reader.first_read_state = RUNNING
    scene.peer.advance()
    scene.reader.can_post = False
    [failed] = scene.step()
    assert failed == PullFailed(1, FailureKind.PEER_LOST, "cannot be posted", True)
    assert (scene.peer.error is None, scene.peer.closed) == (False, False)  # the first read still runs
    scene.end_reads()
    scene.step()
    assert scene.peer.closed
    scene.check_over()


def test_a_proof_that_cannot_be_posted_fails_settled_since_no_data_is_in_flight() -> None:
    scene = PullScene().reading()
    scene.reader.can_post = False
    scene.end_reads()
    [failed] = scene.step()
    assert failed == PullFailed(1, FailureKind.PEER_LOST, "cannot be posted", True)
    scene.check_over()


@pytest.mark.parametrize(
    "changes",
    [{"remote_block_ids": (3, 4, NUM_BLOCKS)}, {"lease_slot": NUM_SLOTS}],
)
def test_a_ticket_that_names_unknown_blocks_is_refused_before_any_read(
    changes: dict[str, object],
) -> None:
    scene = PullScene()
    wrong = msgspec.structs.replace(TICKET, **changes)
    scene.pull = scene.make_pull(ticket=wrong)
    assert failure(*scene.welcomed().step()) == PullFailure(kind=FailureKind.REFUSED, settled=True)
    assert scene.reader.runs == []


def test_a_read_that_outlasts_the_deadline_fails_at_once_and_settles_when_it_ends() -> None:
    scene = PullScene().reading()
    assert scene.step(after_s=TIMEOUT_S - 0.1) == []
    [failed] = scene.step(after_s=0.1)
    assert failed == PullFailed(
        1, FailureKind.TIMEOUT, "reading from the worker at 127.0.0.1:5 took longer than 10 s", settled=False
    )
    assert scene.released
    assert scene.step(after_s=1000.0) == []
    scene.end_reads()
    assert scene.step() == [PullSettled(1)]
    scene.check_over()


def test_no_pull_waits_for_an_earlier_pull_that_timed_out() -> None:
    """The bug: after a link was cut and restored, every pull waited for its own time-out until TCP had retransmitted
    the lost packets."""
    scene = PullScene().reading()
    late = scene.pull
    scene.step(after_s=TIMEOUT_S)
    scene.pull = scene.make_pull(2)
    [failed] = scene.step()
    message = "an earlier read from the worker at 127.0.0.1:5 has not ended"
    assert failed == PullFailed(2, FailureKind.TIMEOUT, message, settled=True)
    assert ReaderDone(LEASE_ID, "d:2") in scene.client.sent
    scene.end_reads()
    scene.reader.blocks_state = DONE
    assert late.advance() == PullSettled(1)
    scene.pull = scene.make_pull(3)
    assert [type(event) for event in scene.step()] == [PullLanded]
    scene.check_over()


def test_no_pull_waits_for_an_earlier_pull_whose_proof_timed_out() -> None:
    scene = PullScene().proving()
    scene.step(after_s=TIMEOUT_S)
    scene.pull = scene.make_pull(2)
    assert failure(*scene.step()) == PullFailure(kind=FailureKind.TIMEOUT, settled=True)
    scene.end_reads()
    scene.reader.proof_state = DONE
    scene.step()
    scene.pull = scene.make_pull(3)
    assert [type(event) for event in scene.step()] == [PullLanded]
    scene.check_over()


def test_a_read_that_breaks_after_the_deadline_settles_too_and_loses_the_peer() -> None:
    scene = PullScene().reading()
    scene.step(after_s=TIMEOUT_S)
    scene.end_reads(FAILED)
    assert scene.step() == [PullSettled(1)]
    assert scene.peer.error is not None
    scene.check_over()


def test_a_worker_that_is_not_connected_by_the_deadline_is_unreachable() -> None:
    scene = PullScene()
    scene.pull = scene.make_pull(timeout_s=0.5)
    [failed] = scene.step(after_s=0.5)
    assert failed == PullFailed(1, FailureKind.UNREACHABLE, "the worker at 127.0.0.1:5 does not answer", settled=True)
    assert scene.released
    scene.check_over()


def test_data_that_arrives_in_the_round_of_the_deadline_is_used() -> None:
    scene = PullScene().reading()
    scene.end_reads()
    assert [type(event) for event in scene.step(after_s=TIMEOUT_S)] == [PullLanded]


def test_a_proof_that_outlasts_the_deadline_fails_settled_and_is_closed_when_it_ends() -> None:
    scene = PullScene().proving()
    assert failure(*scene.step(after_s=TIMEOUT_S)) == PullFailure(kind=FailureKind.TIMEOUT, settled=True)
    assert scene.released
    busy = [scene.peer.busy]
    scene.end_reads()
    scene.step()
    busy.append(scene.peer.busy)
    assert busy == [True, False]
    scene.check_over()


def test_a_pull_abandoned_before_any_read_settles_at_once_and_releases_the_lease() -> None:
    scene = PullScene()
    assert scene.pull.abandon() == PullSettled(1)
    assert scene.released
    assert scene.pull.abandon() is None
    scene.check_over()


def test_a_pull_abandoned_while_it_reads_settles_once_the_read_has_ended() -> None:
    scene = PullScene().reading()
    assert scene.pull.abandon() is None
    assert scene.released
    assert scene.pull.abandon() is None
    assert scene.step(after_s=TIMEOUT_S) == []  # no second failure at the deadline
    scene.end_reads()
    assert scene.step() == [PullSettled(1)]
    assert scene.pull.abandon() is None
    scene.check_over()


def test_a_pull_abandoned_while_it_reads_the_proof_settles_at_once() -> None:
    scene = PullScene().proving()
    assert scene.pull.abandon() == PullSettled(1)
    assert scene.released
    scene.end_reads()
    scene.step()
    scene.check_over()


def test_a_pull_abandoned_after_the_deadline_settles_once() -> None:
    scene = PullScene().reading()
    assert len(scene.step(after_s=TIMEOUT_S)) == 1
    assert scene.pull.abandon() is None
    scene.end_reads()
    assert scene.step() == [PullSettled(1)]
    assert scene.client.sent.count(ReaderDone(LEASE_ID, "d:1")) == 1


def test_a_closed_pull_is_settled_unless_its_data_is_still_being_read() -> None:
    for scene, settled in ((PullScene(), True), (PullScene().reading(), False), (PullScene().proving(), True)):
        assert scene.pull.close() == PullFailed(1, FailureKind.CLOSED, "this worker is stopping", settled)
        assert scene.released
        assert scene.pull.close() is None
