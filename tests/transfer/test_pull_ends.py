"""A pull that ends from this side: by its deadline, abandoned, or with everything else."""

from motet.transfer.base import Failed, FailureKind, Landed, Settled
from motet.transfer.channel import Release
from motet.transfer.peer import PeerState
from motet.transfer.pull import Pull, PullTerms
from tests.transfer.scene import DONE, FAILED, TICKET, TIMEOUT_S, Scene
from tests.transfer.worker import LEASE_ID, order


def test_a_read_that_outlasts_the_deadline_fails_at_once_and_settles_when_it_ends() -> None:
    scene = Scene().reading()
    assert scene.step(after_s=TIMEOUT_S - 0.1) == []
    [failed] = scene.step(after_s=0.1)
    assert failed == Failed(1, FailureKind.TIMEOUT, "the worker at 127.0.0.1:5 took longer than 10 s", settled=False)
    assert scene.released
    assert scene.step(after_s=1000.0) == []
    scene.end_reads()
    assert scene.step() == [Settled(1)]
    scene.check_over()


def test_no_pull_waits_behind_one_that_was_too_late() -> None:
    """After a link was cut and mended, each prompt waited for a deadline of its own until TCP had sent again what was
    lost."""
    scene = Scene().reading()
    late = scene.pull
    scene.step(after_s=TIMEOUT_S)
    scene.pull = scene.pulled(2)
    [failed] = scene.step()
    owes = "the worker at 127.0.0.1:5 still owes what was asked of it earlier"
    assert failed == Failed(2, FailureKind.TIMEOUT, owes, settled=True)
    assert Release(LEASE_ID, "d:2") in scene.line.said
    scene.end_reads()
    scene.reader.blocks = DONE
    assert late.advance() == Settled(1)
    scene.pull = scene.pulled(3)
    [landed] = scene.step()
    assert isinstance(landed, Landed)
    scene.check_over()


def test_nor_behind_one_whose_proof_was_too_late() -> None:
    scene = Scene().proving()
    scene.step(after_s=TIMEOUT_S)
    scene.pull = scene.pulled(2)
    [failed] = scene.step()
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.TIMEOUT
    scene.end_reads()
    scene.reader.proof = DONE
    scene.step()
    scene.pull = scene.pulled(3)
    [landed] = scene.step()
    assert isinstance(landed, Landed)
    scene.check_over()


def test_a_read_that_breaks_after_the_deadline_settles_too_and_loses_the_peer() -> None:
    scene = Scene().reading()
    scene.step(after_s=TIMEOUT_S)
    scene.end_reads(FAILED)
    assert scene.step() == [Settled(1)]
    assert scene.peer.state is PeerState.GONE
    scene.check_over()


def test_a_worker_that_is_not_met_by_the_deadline_is_unreachable() -> None:
    scene = Scene()
    scene.pull = Pull(order(TICKET), scene.peer, PullTerms("d:1", scene.clock.now_s, 0.5), scene.clock)
    [failed] = scene.step(after_s=0.5)
    assert failed == Failed(1, FailureKind.UNREACHABLE, "the worker at 127.0.0.1:5 does not answer", settled=True)
    assert scene.released
    scene.check_over()


def test_data_that_comes_in_the_round_of_the_deadline_is_not_thrown_away() -> None:
    scene = Scene().reading()
    scene.end_reads()
    [landed] = scene.step(after_s=TIMEOUT_S)
    assert isinstance(landed, Landed)


def test_a_proof_that_outlasts_the_deadline_fails_settled_and_is_closed_when_it_ends() -> None:
    scene = Scene().proving()
    [failed] = scene.step(after_s=TIMEOUT_S)
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.settled) == (FailureKind.TIMEOUT, True)
    assert scene.released
    busy = [scene.peer.busy]
    scene.end_reads()
    scene.step()
    busy.append(scene.peer.busy)
    assert busy == [True, False]
    scene.check_over()


def test_abandoned_before_anything_was_posted_it_settles_at_once_and_tells_the_lease() -> None:
    scene = Scene()
    assert scene.pull.abandon() == Settled(1)
    assert scene.released
    assert scene.pull.abandon() is None
    scene.check_over()


def test_abandoned_while_it_reads_it_settles_once_the_read_has_ended() -> None:
    scene = Scene().reading()
    assert scene.pull.abandon() is None
    assert scene.released
    assert scene.pull.abandon() is None
    assert scene.step(after_s=TIMEOUT_S) == []  # no second ending by the deadline
    scene.end_reads()
    assert scene.step() == [Settled(1)]
    assert scene.pull.abandon() is None
    scene.check_over()


def test_abandoned_while_it_proves_it_settles_at_once() -> None:
    scene = Scene().proving()
    assert scene.pull.abandon() == Settled(1)
    assert scene.released
    scene.end_reads()
    scene.step()
    scene.check_over()


def test_abandoned_after_the_deadline_it_settles_once() -> None:
    scene = Scene().reading()
    assert len(scene.step(after_s=TIMEOUT_S)) == 1
    assert scene.pull.abandon() is None
    scene.end_reads()
    assert scene.step() == [Settled(1)]
    assert scene.line.said.count(Release(LEASE_ID, "d:1")) == 1


def test_closed_before_it_reads_or_while_it_proves_it_is_settled_and_while_it_reads_it_is_not() -> None:
    for scene, settled in ((Scene(), True), (Scene().reading(), False), (Scene().proving(), True)):
        assert scene.pull.close() == Failed(1, FailureKind.CLOSED, "this worker stops", settled)
        assert scene.released
        assert scene.pull.close() is None
