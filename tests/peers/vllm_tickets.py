"""KV transfers between fake vLLM servers: the blocks that wait for a reader, and the faults of clients."""

from dataclasses import dataclass, field
from enum import Enum, auto
from uuid import uuid4

from tests.peers.vllm_tokens import SampledChoices, state_of


class Held(Enum):
    """State of a prefilled prompt's blocks."""

    PINNED = auto()
    READ = auto()
    REJECTED = auto()
    EXPIRED = auto()
    LOST = auto()
    """The server that held them is dead."""


@dataclass
class Prefilled:
    """A prompt whose blocks wait for a reader."""

    id: str
    engine_id: str
    prompt_state: int
    num_tokens: int
    held: Held = Held.PINNED
    reads: int = 0


@dataclass
class Network:
    """State that the servers of one test share. `faults` are errors of the client: tests assert that there are none."""

    prefilled: dict[str, Prefilled] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    sampled: SampledChoices = field(default_factory=SampledChoices)
    transfers: int = 0
    """Number of reads of KV. Each choice of a request with a ticket is one."""
    pulling: int = 0

    @property
    def pinned(self) -> list[str]:
        return [entry.id for entry in self.prefilled.values() if entry.held is Held.PINNED]

    def reads(self, ticket: str) -> int:
        return self.prefilled[ticket].reads

    def expire(self) -> None:
        """Expires the leases of all tickets that no server has read."""
        for entry in self.prefilled.values():
            if entry.held is Held.PINNED:
                entry.held = Held.EXPIRED

    def lose(self, engine_id: str) -> None:
        """Marks the blocks of a dead server as lost."""
        for entry in self.prefilled.values():
            if entry.engine_id == engine_id:
                entry.held = Held.LOST

    def pin(self, engine_id: str, prompt: list[int], block_size: int) -> dict[str, object]:
        """Holds the blocks of a prompt, and returns the ticket in the form of vLLM's `NixlConnector`."""
        entry = Prefilled(f"cmpl-{uuid4().hex[:16]}-0-{uuid4().hex[:8]}", engine_id, state_of(prompt), len(prompt))
        self.prefilled[entry.id] = entry
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 + -(-len(prompt) // block_size)))],
            "remote_engine_id": engine_id,
            "remote_request_id": entry.id,
            "remote_host": "127.0.0.1",
            "remote_port": 5601,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(prompt),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    def refuse(self, ticket: dict[str, object]) -> None:
        """Frees the blocks of a ticket: a decode server rejected its request, and notified their owner."""
        entry = self._entry(ticket)
        if entry is not None and entry.held is Held.PINNED:
            entry.held = Held.REJECTED

    def read(self, ticket: dict[str, object], prompt: list[int]) -> "Read":
        """Reads the KV for one sequence, and records a fault if the client should not have sent this ticket."""
        entry = self._entry(ticket)
        if entry is None or entry.held is Held.LOST:
            return Read.FAILED
        self.transfers += 1
        entry.reads += 1
        if entry.held is not Held.PINNED:
            self.faults.append(f"{entry.id} was read when it was {entry.held.name}")
            return Read.STALE
        entry.held = Held.READ
        if state_of(prompt) != entry.prompt_state:
            self.faults.append(f"{entry.id} was read for another prompt")
            return Read.STALE
        return Read.FETCHED

    def _entry(self, ticket: dict[str, object]) -> Prefilled | None:
        return self.prefilled.get(str(ticket.get("remote_request_id")))


class Read(Enum):
    """Outcome of a fetch."""

    FETCHED = auto()
    STALE = auto()
    """The blocks belong to another prompt: a real server generates wrong tokens and does not notice."""
    FAILED = auto()
