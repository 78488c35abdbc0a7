"""A transport whose reads end when the test says so, for tests of the code that uses transports."""

from dataclasses import dataclass, field

from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.ticket import TransportKind
from motet.transfer.transport import BlockRun, KVFacts, PostedRead, ReadState, RegisteredMemory

NUM_BLOCKS = 16
NUM_SLOTS = 4
BLOCK_BYTES = 64
FACTS = KVFacts(model_digest="m", dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8)
MEMORY = RegisteredMemory(
    regions=(0,), region_block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS, proof=0, proof_entries=NUM_BLOCKS + NUM_SLOTS
)


class ScriptedRead:
    """A read that runs until the test sets `state`."""

    def __init__(self, num_bytes: int, num_descriptors: int, state: ReadState) -> None:
        self.num_bytes = num_bytes
        self.num_descriptors = num_descriptors
        self.state = state
        self.closed = False

    def poll(self) -> ReadState:
        return self.state

    def close(self) -> None:
        assert self.state is not ReadState.RUNNING
        assert not self.closed
        self.closed = True


@dataclass
class Wires:
    """The scripted transports of one test, by their descriptions, so that they can connect to each other."""

    ends: dict[bytes, "ScriptedTransport"] = field(default_factory=dict)


class ScriptedTransport:
    """Reads of blocks start in `blocks_state`, reads of the proof in `proof_state`, and the first read of a connection
    in `first_read_state`."""

    kind = TransportKind.NIXL

    def __init__(self, name: str, wires: Wires) -> None:
        self.name = name
        self.proof_entries = [0] * (NUM_BLOCKS + NUM_SLOTS)
        """Entries that other workers find when they read the proof of this one."""
        self.blocks_state = self.proof_state = self.first_read_state = ReadState.DONE
        self.can_post = True
        """False makes posting a read fail."""
        self.reads: list[ScriptedRead] = []
        self.runs: list[BlockRun] = []
        self.inbox: list[bytes] = []
        self.loses_notifications = False
        self.wakes = False
        """True makes `has_arrivals` report messages that were not polled."""
        self.num_polls = 0
        self.connected: list[str] = []
        self.closed = False
        self.num_registrations = 1
        """Number of times that the memory was registered."""
        self.deregistered = False
        self._wires = wires
        wires.ends[self.describe()] = self

    def describe(self) -> bytes:
        number = self.num_registrations
        return self.name.encode() if number == 1 else f"{self.name} {number}".encode()

    def connect(self, description: bytes, memory: RegisteredMemory) -> str:
        if description not in self._wires.ends:
            raise TransferError("no such worker", FailureKind.PEER_LOST)
        assert description.decode() not in self.connected
        self.connected.append(description.decode())
        return description.decode()

    def disconnect(self, peer: str) -> None:
        self.connected.remove(peer)

    def read_blocks(self, peer: str, runs: list[BlockRun]) -> PostedRead:
        self._other_end(peer)
        self.runs += runs
        return self._read(sum(run.count for run in runs) * BLOCK_BYTES, len(runs), self.blocks_state)

    def read_proof(self, peer: str, entries: list[int]) -> tuple[PostedRead, list[int]]:
        other = self._other_end(peer)
        state = self.first_read_state if entries == [0] else self.proof_state
        return self._read(8 * len(entries), len(entries), state), [other.proof_entries[entry] for entry in entries]

    def notify(self, peer: str, message: bytes) -> None:
        other = self._wires.ends[peer.encode()]
        if not other.loses_notifications:
            other.inbox.append(message)

    def has_arrivals(self) -> bool:
        return bool(self.inbox) and self.wakes

    def poll(self) -> list[bytes]:
        self.num_polls += 1
        messages, self.inbox = self.inbox, []
        return messages

    def deregister_blocks(self) -> bool:
        self.deregistered = all(read.state is not ReadState.RUNNING for read in self.reads)
        return self.deregistered

    def register_blocks(self) -> None:
        self.num_registrations += self.deregistered
        self.deregistered = False

    def close(self) -> None:
        self.closed = True

    def _other_end(self, peer: str) -> "ScriptedTransport":
        if not self.can_post or peer not in self.connected:
            raise TransferError("cannot be posted", FailureKind.PEER_LOST)
        return self._wires.ends[peer.encode()]

    def _read(self, num_bytes: int, num_descriptors: int, state: ReadState) -> ScriptedRead:
        read = ScriptedRead(num_bytes, num_descriptors, state)
        self.reads.append(read)
        return read
