"""A prefill core and a decode core in one process, with transfers that the test controls."""

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from motet.engines.native.build import Parts, build_parts
from motet.engines.native.core import EngineCore
from motet.engines.native.step.run import ModelRunner
from motet.errors import MotetError
from motet.grammar.compiled_grammar import Grammars
from motet.ids import RequestId
from motet.transfer import orders
from motet.transfer.orders import FailureKind
from motet.transfer.proof import Proof
from motet.transfer.thread import TransferThread
from motet.transfer.ticket import ClusterKey, Ticket, TransferAddress
from motet.transfer.transport import RegisteredMemory, merged
from motet.types import GenerateRequest, Role
from tests.engines.native.drive import GroupOutcome, gb_of, make_core, run, take_step
from tests.tiny_engine import engine_config


class CountingRunner:
    """A runner that counts the calls of `settle`."""

    trunk_tokens_saved = 0

    def __init__(self, runner: ModelRunner) -> None:
        self.settled = 0
        self.device = runner.device
        self.run, self.verify, self.copy_slots = runner.run, runner.verify, runner.copy_slots

    def settle(self) -> None:
        self.settled += 1


class ScriptedTransfers(TransferThread):
    """Transfers without a thread. Orders wait until the test lets them land, fail or settle. They copy real memory."""

    def __init__(self, name: str, memory: RegisteredMemory) -> None:
        self.address = TransferAddress(name, "nowhere", 1)
        self.memory = memory
        self.peers: dict[str, ScriptedTransfers] = {}
        self.orders: dict[int, orders.PullOrder] = {}
        self.abandoned: set[int] = set()
        self.expected: list[Ticket] = []
        self.released: list[Ticket] = []
        self.leases_held = 0
        self.registered = True
        """False while the memory is deregistered."""
        self.key = ClusterKey("")
        self.later: list[orders.TransferEvent] = []
        """What the next call of `news` returns."""
        self._idle_fd: int | None = None

    def order(self, order: orders.Order) -> None:
        match order:
            case orders.KeepAlive(ticket):
                self.expected.append(ticket)
            case orders.PullOrder(number):
                self.orders[number] = order
            case orders.AbandonPull(number):
                self.abandoned.add(number)
                if pull := self.orders.get(number):
                    self._notify_owner(pull.ticket)
            case orders.ReleaseTicket(ticket):
                self.released.append(ticket)
                self._notify_owner(ticket)
            case orders.ConnectWorker(number):
                self.later.append(orders.ConnectResult(number, None))
            case orders.LeasesHeld(num_leases):
                self.leases_held = num_leases

    def fileno(self) -> int:
        """Returns a descriptor that is never readable: tests take steps by themselves."""
        if self._idle_fd is None:
            self._idle_fd = os.eventfd(0)
        return self._idle_fd

    def take_events(self) -> list[orders.TransferEvent]:
        events, self.later = self.later, []
        return events

    def deregister_memory(self) -> bool:
        self.registered = bool(self.orders)
        return not self.registered

    def register_memory(self) -> None:
        self.registered = True

    def close(self) -> None: ...

    def copy(self, number: int) -> int:
        """Copies the bytes of an order, and returns their number."""
        order = self.orders[number]
        peer = self.peers[order.ticket.remote_engine_id].memory
        size = self.memory.region_block_bytes
        for piece in merged((remote, local) for remote, _, local in order.pairs):
            for local, remote in zip(self.memory.regions, peer.regions, strict=True):
                ctypes.memmove(local + piece.local * size, remote + piece.remote * size, piece.count * size)
        return len(order.pairs) * len(self.memory.regions) * size

    def land(self, number: int) -> None:
        num_bytes = self.copy(number)
        order = self.orders.pop(number)
        self.later.append(orders.PullLanded(number, num_bytes, 1, 0.01, 0.001))
        self._notify_owner(order.ticket)

    def fail(self, number: int, kind: FailureKind = FailureKind.PEER_LOST, *, settled: bool = True) -> None:
        self.later.append(orders.PullFailed(number, kind, f"the pull failed: {kind}", settled))
        if settled:
            del self.orders[number]

    def settle(self, number: int) -> None:
        """Ends a pull that was abandoned or has failed: its bytes arrive late."""
        self.copy(number)
        del self.orders[number]
        self.later.append(orders.PullSettled(number))

    def _notify_owner(self, ticket: Ticket) -> None:
        self.peers[ticket.remote_engine_id].later.append(orders.ReaderDone(ticket.lease_id, self.address.engine_id))


class CorePair:
    """A prefill core P and a decode core D over the same tiny model. D is connected to P."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill_blocks: int = 256,
        decode_blocks: int = 256,
        lease_s: float = 60.0,
        grammars: Grammars | None = None,
        **changes: object,
    ) -> None:
        self.folder = folder
        self.lease_s = lease_s
        self.grammars = grammars
        self.now_s = 1000.0
        self.runners: dict[str, CountingRunner] = {}
        self.parts: dict[str, Parts] = {}
        self.p, self.p_transfers = self._core(folder, "P", Role.PREFILL, prefill_blocks, changes)
        self.d, self.d_transfers = self._core(folder, "D", Role.DECODE, decode_blocks, changes)
        self.d_transfers.peers["P"] = self.p_transfers
        self.outcomes: dict[str, GroupOutcome] = {}

    def _core(
        self, folder: Path, name: str, role: Role, blocks: int, changes: dict[str, object]
    ) -> tuple[EngineCore, ScriptedTransfers]:
        fields = {"block_size": 8, "dtype": "float32", "max_num_batched_tokens": 128, **changes}
        itemsize = 4 if fields["dtype"] == "float32" else 2
        kv_cache_gb = gb_of(blocks, itemsize)
        parts = build_parts(engine_config(folder, role=role, kv_cache_gb=kv_cache_gb, lease_s=self.lease_s, **fields))
        self.parts[name] = parts
        proof = Proof(parts.info.num_blocks)
        transfers = ScriptedTransfers(name, parts.storage.memory(proof))
        runner = CountingRunner(parts.runner)
        self.runners[name] = runner
        options = parts.options if self.grammars is None else replace(parts.options, grammars=self.grammars)
        core = EngineCore(
            parts.info, runner, options=options, proof=proof, transfers=transfers, clock=lambda: self.now_s
        )
        return core, transfers

    def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Lets P prefill a request, and returns the ticket."""
        self.p.prefill(request, readers=readers)
        return self.step_p_until(lambda tickets: request.request_id in tickets)[request.request_id]

    def step_p_until(self, enough: Callable[[dict[RequestId, Ticket]], bool]) -> dict[RequestId, Ticket]:
        tickets: dict[RequestId, Ticket] = {}
        for _ in range(1000):
            result = self.p.step()
            self.p.check()
            if error := next(iter(result.failures.values()), None):
                raise error
            tickets |= result.tickets
            if enough(tickets):
                return tickets
        raise AssertionError("there is no ticket after 1000 steps")

    def step_d(self) -> None:
        take_step(self.d, self.outcomes)

    def submit(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.outcomes[request.request_id] = GroupOutcome()
            self.d.submit(request)

    def finish(self, *, land: bool = True) -> None:
        """Steps D to the end of all its groups. Pulls land as soon as they are ordered, if `land`."""
        for _ in range(20_000):
            if not self.d.busy:
                return
            self.step_d()
            if land:
                self.land_all()
        raise AssertionError("the groups of D do not end")

    def land_all(self) -> None:
        """Lands all pulls that are ordered and not abandoned."""
        for number in set(self.d_transfers.orders) - self.d_transfers.abandoned:
            self.d_transfers.land(number)

    def hand_over(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Lets P prefill, gives the ticket to D, and returns it."""
        ticket = self.prefill(request, readers=readers)
        self.submit(with_ticket(request, ticket))
        return ticket

    def check_same(self, *requests: GenerateRequest) -> None:
        """Checks that D generated the same tokens for these requests as a single core."""
        assert tokens(self.outcomes, [request.request_id for request in requests]) == alone(self.folder, *requests)

    def settle_p(self) -> None:
        self.p.step()
        self.p.check()

    def check_empty(self) -> None:
        """Checks that neither core holds blocks, leases or pulls."""
        self.settle_p()
        for core in (self.p, self.d):
            core.check()
            stats = core.stats()
            held = (stats.blocks_used, stats.leases, stats.pulls_open, stats.blocks_pulling, stats.groups_running)
            assert held == (0, 0, 0, 0, 0), held
        assert self.p_transfers.leases_held == 0


def tokens(outcomes: dict[str, GroupOutcome], names: Iterable[str]) -> dict[str, dict[int, list[int]]]:
    found = {}
    for name in names:
        error: MotetError | None = outcomes[name].error
        assert error is None, error
        found[name] = outcomes[name].tokens
    return found


def alone(folder: Path, *requests: GenerateRequest, dtype: str = "float32") -> dict[str, dict[int, list[int]]]:
    """Returns the answers of a single core to these requests."""
    fresh = [msgspec.structs.replace(request, ticket=None) for request in requests]
    outcomes = run(make_core(folder, dtype=dtype, draft_tokens=0), fresh)
    return {name: outcome.tokens for name, outcome in outcomes.items()}


def with_ticket(request: GenerateRequest, ticket: Ticket) -> GenerateRequest:
    return msgspec.structs.replace(request, ticket=ticket)
