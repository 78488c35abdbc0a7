"""KV on its way between played vLLM servers: who holds what for whom, and what clients did wrong."""

from dataclasses import dataclass, field
from enum import Enum, auto
from uuid import uuid4

from tests.peers.vllm_tokens import Draws, state_of


class Held(Enum):
    """The fate of a prefilled prompt's blocks."""

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
    """What the servers of one test know of each other. `faults` are the client's: a test asserts that it has none."""

    prefilled: dict[str, Prefilled] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    draws: Draws = field(default_factory=Draws)
    transfers: int = 0
    """Number of reads of KV. Each choice of a request with a ticket is one."""
    pulling: int = 0

    @property
    def pinned(self) -> list[str]:
        return [entry.id for entry in self.prefilled.values() if entry.held is Held.PINNED]

    def reads(self, ticket: str) -> int:
        return self.prefilled[ticket].reads

    def expire(self) -> None:
        """Ends the leases of all tickets that nobody used."""
        for entry in self.prefilled.values():
            if entry.held is Held.PINNED:
                entry.held = Held.EXPIRED

    def lose(self, engine_id: str) -> None:
        """Notes that the server that held them is dead."""
        for entry in self.prefilled.values():
            if entry.engine_id == engine_id:
                entry.held = Held.LOST

    def pin(self, engine_id: str, prompt: list[int], block_size: int) -> dict[str, object]:
        """Returns the ticket, as `NixlConnector` writes it."""
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
        """Notes that a decode server rejected a request with this ticket, and told the server that holds the blocks."""
        entry = self._entry(ticket)
        if entry is not None and entry.held is Held.PINNED:
            entry.held = Held.REJECTED

    def read(self, ticket: dict[str, object], prompt: list[int]) -> "Read":
        """Reads the KV for one sequence."""
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
    """How a fetch ended."""

    FETCHED = auto()
    STALE = auto()
    """The blocks are somebody else's by now: a real server writes nonsense and does not notice."""
    FAILED = auto()
