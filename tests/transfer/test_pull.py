"""A pull at every stage, with a clock and reads that go when the test says so."""

from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from motet.transfer import channel
from motet.transfer.base import Failed, FailureKind, Landed, News, ReadState, Settled
from motet.transfer.channel import Answer, Attend, Hello, Question, Refused, Release, SomeoneElse, Waits, Welcome
from motet.transfer.layout import Run
from motet.transfer.peer import Caller, Peer, PeerState
from motet.transfer.pull import WAITS_EVERY_S, Pull, PullTerms
from motet.transfer.ticket import TransferAddress
from tests.transfer.clock import Clock
from tests.transfer.scripted import FACTS, MEMORY, NUM_BLOCKS, NUM_SLOTS, ScriptedRead, ScriptedTransport, Wires
from tests.transfer.worker import LEASE_ID, LEASE_SLOT, order, ticket_at

ANSWER_S = 2.0
TIMEOUT_S = 10.0
ADDRESS = TransferAddress("p", "127.0.0.1", 5)
TICKET = ticket_at(ADDRESS, (3, 4, 7))
RUNNING, DONE, FAILED = ReadState.RUNNING, ReadState.DONE, ReadState.FAILED


@dataclass
class ScriptedLine:
    """The other worker says what the test puts here."""

    said: list[Question] = field(default_factory=list)
    coming: deque[Answer] = field(default_factory=deque)
    nonce: bytes = b""
    """Of the last Hello."""
    closed: bool = False

    def say(self, question: Question, nonce: bytes) -> None:
        assert not self.closed
        self.said.append(question)
        if isinstance(question, Hello):
            self.nonce = nonce

    def answers(self) -> list[tuple[bytes, Answer]]:
        answers = [(self.nonce, answer) for answer in self.coming]
        self.coming.clear()
        return answers

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Scene:
    """One reader, one owner that holds the ticket's lease, one pull."""

    def __init__(self) -> None:
        wires = Wires()
        self.clock = Clock()
        self.owner = ScriptedTransport("p", wires)
        self.reader = ScriptedTransport("d", wires)
        self.line = ScriptedLine()
        self.owner.shows[NUM_BLOCKS + LEASE_SLOT] = LEASE_ID
        for block, generation in zip(TICKET.remote_block_ids, TICKET.generations, strict=True):
            self.owner.shows[block] = generation
        self.peer = Peer(ADDRESS, Caller(FACTS, ANSWER_S, self.clock), self.reader, self.line)
        self.peer.ask()
        self.pull = self.pulled()

    def pulled(self, number: int = 1) -> Pull:
        terms = PullTerms(f"d:{number}", self.clock.now_s, TIMEOUT_S)
        return Pull(order(TICKET, number), self.peer, terms, self.clock)

    def welcomed(self) -> "Scene":
        self.line.coming.append(Welcome("p", b"p", MEMORY))
        return self

    def reading(self) -> "Scene":
        """The data read runs."""
        self.reader.blocks = RUNNING
        assert self.welcomed().step() == []
        return self

    def proving(self) -> "Scene":
        """The data is here, the read of the proof runs."""
        self.reader.proof = RUNNING
        assert self.welcomed().step() == []
        return self

    def step(self, *, after_s: float = 0.0) -> list[News]:
        """One round."""
        self.clock.now_s += after_s
        self.peer.advance()
        news = None if self.pull.over else self.pull.advance()
        self.peer.advance()
        return [] if news is None else [news]

    def end_reads(self, state: ReadState = DONE) -> None:
        for read in self.open_reads():
            read.state = state

    def open_reads(self) -> list[ScriptedRead]:
        return [read for read in self.reader.reads if read.state is RUNNING]

    @property
    def released(self) -> bool:
        """Whether the lease was told over the side channel."""
        return Release(LEASE_ID, "d:1") in self.line.said

    def check_over(self) -> None:
        assert self.pull.over
        assert all(read.closed for read in self.reader.reads)


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
    scene.owner.shows[NUM_BLOCKS + LEASE_SLOT] = LEASE_ID + 1
    [failed] = scene.step()
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.LEASE_ENDED


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


def test_a_read_that_breaks_after_the_deadline_settles_too_and_loses_the_peer() -> None:
    scene = Scene().reading()
    scene.step(after_s=TIMEOUT_S)
    scene.end_reads(FAILED)
    assert scene.step() == [Settled(1)]
    assert scene.peer.state is PeerState.GONE
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


def test_a_lost_acknowledgement_goes_over_the_side_channel() -> None:
    scene = Scene().proving()
    scene.reader.posts = False
    scene.end_reads()
    [landed] = scene.step()
    assert isinstance(landed, Landed)
    assert scene.released


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
