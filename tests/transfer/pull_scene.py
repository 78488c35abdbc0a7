"""One pull between a scripted owner and a scripted reader, with a clock that the test sets."""

from collections import deque

from motet.transfer.orders import ReaderDone, TransferEvent
from motet.transfer.peer import Peer, PeerChannel, ReaderTerms
from motet.transfer.pull import Pull
from motet.transfer.side_channel import ChannelReply, ChannelRequest, Hello, SideChannelClient, Welcome
from motet.transfer.ticket import Ticket, TransferAddress
from motet.transfer.transport import ReadState
from tests.clock import Clock
from tests.transfer.scripted import FACTS, MEMORY, NUM_BLOCKS, ScriptedRead, ScriptedTransport, Wires
from tests.transfer.worker import LEASE_ID, LEASE_SLOT, order, ticket_at

ANSWER_S = 2.0
TIMEOUT_S = 10.0
ADDRESS = TransferAddress("p", "127.0.0.1", 5)
TICKET = ticket_at(ADDRESS, (3, 4, 7))
RUNNING, DONE, FAILED = ReadState.RUNNING, ReadState.DONE, ReadState.FAILED


class ScriptedClient(SideChannelClient):
    """A side-channel client without a socket. The test puts the replies of the other worker into `incoming`."""

    def __init__(self) -> None:
        self.sent: list[ChannelRequest] = []
        self.incoming: deque[ChannelReply] = deque()
        self.nonce = b""
        """Nonce of the last Hello, and of all replies."""
        self.closed = False

    def send(self, request: ChannelRequest, nonce: bytes) -> None:
        assert not self.closed
        self.sent.append(request)
        if isinstance(request, Hello):
            self.nonce = nonce

    def replies(self) -> list[tuple[bytes, ChannelReply]]:
        replies = [(self.nonce, reply) for reply in self.incoming]
        self.incoming.clear()
        return replies

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class PullScene:
    """One reader, one owner that holds the ticket's lease, one pull."""

    def __init__(self) -> None:
        wires = Wires()
        self.clock = Clock()
        self.owner = ScriptedTransport("p", wires)
        self.reader = ScriptedTransport("d", wires)
        self.client = ScriptedClient()
        self.owner.proof_entries[NUM_BLOCKS + LEASE_SLOT] = TICKET.digest
        for block, generation in zip(TICKET.remote_block_ids, TICKET.generations, strict=True):
            self.owner.proof_entries[block] = generation
        self.peer = Peer(PeerChannel(ADDRESS, ReaderTerms(FACTS, ANSWER_S, self.clock), self.client), self.reader)
        self.peer.channel.send_hello()
        self.pull = self.make_pull()

    def make_pull(self, number: int = 1, *, ticket: Ticket = TICKET, timeout_s: float = TIMEOUT_S) -> Pull:
        return Pull(
            order=order(ticket, number),
            peer=self.peer,
            clock=self.clock,
            reader=f"d:{number}",
            ordered_s=self.clock.now_s,
            timeout_s=timeout_s,
        )

    def welcomed(self) -> "PullScene":
        """Lets the owner answer the reader's Hello with a Welcome."""
        self.client.incoming.append(Welcome("p", b"p", MEMORY))
        return self

    def reading(self) -> "PullScene":
        """Advances the pull until the read of the data runs."""
        self.reader.blocks_state = RUNNING
        assert self.welcomed().step() == []
        return self

    def proving(self) -> "PullScene":
        """Advances the pull until the data has arrived and the read of the proof runs."""
        self.reader.proof_state = RUNNING
        assert self.welcomed().step() == []
        return self

    def step(self, *, after_s: float = 0.0) -> list[TransferEvent]:
        """Simulates one round of the transfer thread, and returns its events."""
        self.clock.now_s += after_s
        self.peer.advance()
        event = None if self.pull.over else self.pull.advance()
        self.peer.advance()
        return [] if event is None else [event]

    def end_reads(self, state: ReadState = DONE) -> None:
        for read in self.open_reads():
            read.state = state

    def open_reads(self) -> list[ScriptedRead]:
        return [read for read in self.reader.reads if read.state is RUNNING]

    @property
    def released(self) -> bool:
        """True if the reader has released the lease over the side channel."""
        return ReaderDone(LEASE_ID, "d:1") in self.client.sent

    def check_over(self) -> None:
        assert self.pull.over
        assert all(read.closed for read in self.reader.reads)
