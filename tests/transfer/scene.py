"""One pull between a scripted owner and a scripted reader, under a clock of the test's."""

from collections import deque
from dataclasses import dataclass, field

from motet.transfer.base import News, ReadState
from motet.transfer.channel import Answer, Hello, Question, Release, Welcome
from motet.transfer.peer import Caller, Peer
from motet.transfer.pull import Pull, PullTerms
from motet.transfer.ticket import TransferAddress
from tests.transfer.clock import Clock
from tests.transfer.scripted import FACTS, MEMORY, NUM_BLOCKS, ScriptedRead, ScriptedTransport, Wires
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
        self.owner.shows[NUM_BLOCKS + LEASE_SLOT] = TICKET.digest
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
