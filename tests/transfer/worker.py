"""A worker for tests: a transfer thread, and the ticket of a trunk that it holds."""

import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from motet.transfer.lease import Lease, LeaseTable, new_lease_id
from motet.transfer.orders import FailureKind, PullFailed, PullOrder, TransferEvent
from motet.transfer.proof import Proof
from motet.transfer.thread import TransferSettings, TransferThread
from motet.transfer.ticket import Ticket, TransferAddress
from motet.transfer.transport import KVFacts
from tests.patience import PATIENCE_S
from tests.transfer.scripted import FACTS, MEMORY, NUM_BLOCKS, ScriptedTransport, Wires

LEASE_ID = 77
LEASE_SLOT = 2
NOWHERE = TransferAddress("p", "127.0.0.1", 1)


class EventQueue:
    """Returns the events of a thread one by one."""

    def __init__(self, thread: TransferThread) -> None:
        self._thread = thread
        self._waiting: list[TransferEvent] = []

    def next(self) -> TransferEvent:
        """Waits for the next event, and returns it."""
        if not self._waiting:
            readable, _, _ = select.select([self._thread.fileno()], [], [], PATIENCE_S)
            assert readable, "no event"
            self._waiting = self._thread.take_events()
        return self._waiting.pop(0)


class Worker:
    def __init__(self, thread: TransferThread, transport: ScriptedTransport) -> None:
        self.thread = thread
        self.transport = transport
        self.next_event = EventQueue(thread).next

    def ticket(self, blocks: tuple[int, ...] = (3, 4, 7), *, lease_s: float = 60.0) -> Ticket:
        """Returns the ticket of a trunk in these blocks, under a lease whose digest is in the proof."""
        ticket = ticket_at(self.thread.address, blocks, lease_s=lease_s)
        self.transport.proof_entries[NUM_BLOCKS + LEASE_SLOT] = ticket.digest
        for block in blocks:
            self.transport.proof_entries[block] = 1000 + block
        return ticket


def ticket_at(address: TransferAddress, blocks: Sequence[int] = (3, 4, 7), **changes: object) -> Ticket:
    """Returns a ticket whose fields `changes` have other values."""
    ticket = Ticket(
        remote_engine_id=address.engine_id,
        remote_request_id="group",
        remote_host=address.host,
        remote_port=address.port,
        remote_block_ids=tuple(blocks),
        num_tokens=16 * len(blocks),
        prompt_digest="",
        generations=tuple(1000 + block for block in blocks),
        lease_id=LEASE_ID,
        lease_slot=LEASE_SLOT,
        lease_s=60.0,
    )
    return msgspec.structs.replace(ticket, **changes)


def granted(
    leases: LeaseTable, proof: Proof, blocks: Sequence[int] = (1,), *, now_s: float = 0.0, **changes: object
) -> Lease:
    """Returns a new lease of the worker that has this proof."""
    generations, slot = proof.generations(blocks), proof.allocate_slot()
    ticket = ticket_at(NOWHERE, blocks, generations=generations, lease_id=new_lease_id(), lease_slot=slot, **changes)
    return leases.grant(ticket, now_s=now_s)


def order(ticket: Ticket, number: int = 1) -> PullOrder:
    """Returns the order to pull all blocks of the ticket into local blocks 0, 1, ..."""
    pairs = zip(ticket.remote_block_ids, ticket.generations, strict=True)
    return PullOrder(
        number, ticket, tuple((r, g, local) for local, (r, g) in enumerate(pairs)), label=f"group {number}"
    )


@dataclass(frozen=True)
class PullFailure:
    kind: FailureKind
    settled: bool


def failure(event: TransferEvent) -> PullFailure:
    """Returns the fields of a failed pull that tests compare. The message is not compared."""
    assert isinstance(event, PullFailed), event
    return PullFailure(event.kind, event.settled)


@contextmanager
def dead_port() -> Iterator[int]:
    """Holds a port on which no process listens and which no other process can take."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def worker(
    name: str,
    wires: Wires,
    *,
    key: str = "",
    facts: KVFacts = FACTS,
    port: int = 0,
    pull_timeout_s: float = 10.0,
) -> Iterator[Worker]:
    settings = TransferSettings(
        host="127.0.0.1", port=port, cluster_key=key, pull_timeout_s=pull_timeout_s, engine_id=name
    )
    transport = ScriptedTransport(name, wires)
    thread = TransferThread(settings, facts, memory=MEMORY, make_transport=lambda _: transport)
    try:
        yield Worker(thread, transport)
    finally:
        thread.close()
