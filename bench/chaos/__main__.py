"""Kills engines of a cell every few seconds under mixed load: is any answer lost, duplicated, late or different?

Every kind of request is sent once without faults: chats, completions, messages, groups with a deterministic policy.
Then clients send the same requests repeatedly while engine processes are killed and stopped. Every answer is compared
with the answer without faults, choice by choice: text, finish reason, log-probabilities, usage, the policy's report. At
the end nothing must remain on any engine: no block, lease or group.

    python -m bench.chaos [--gateway] [--minutes 10] [--clients 6] [--check]

Without `--gateway`, the engine processes of a cell are killed and stopped. With it, complete servers after a gateway
are killed, stopped and drained; they are started again under their addresses.
"""

import asyncio
import contextlib
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import quantiles

import httpx

from bench.chaos.faults import DRAINED, KILLED, STOPPED, FaultInjector, WorkerStatus, left_on_workers
from bench.chaos.mixed_requests import RepeatedRequest, mixed_requests
from bench.chaos.received_answers import ComparedAnswers, ReceivedAnswer, receive_answer
from bench.chaos.restarted_servers import restarted_servers
from bench.program.command_line import add_check, benchmark_parser
from bench.program.report import Bound, Target, labelled, machine, print_report
from bench.soak.policy_groups import message_requests, steered_requests
from motet.deploy.child import ChildServer

KINDS = 40
EVERY_S = (2.0, 6.0)
CELL_FAULTS = {KILLED: 0.8, STOPPED: 0.2}
SERVER_FAULTS = {KILLED: 0.4, STOPPED: 0.2, DRAINED: 0.4}
TIMEOUT_S = 300.0
CELL = ("--prefill", "1", "--decode", "2", "--heartbeat-timeout", "3", "--engine-restarts", "1000")
MOVED = re.compile(r" group=(?P<group>\S+) cause=(?P<cause>\S+) choices=")
"""Fields of the log line about a group that moved to another worker. No other log line has these fields."""


@dataclass(frozen=True)
class ChaosReport:
    machine: Mapping[str, str]
    minutes: float
    outcome: ComparedAnswers
    injected_faults: Mapping[str, int]
    """Number of faults by role of the worker and kind of fault."""
    totals: Mapping[str, int]
    """The totals in the server's `/status`."""
    left_behind: Mapping[str, int]
    """Sums over all engines of the figures that must be 0 after all clients have left, by name in `/status`."""
    pauses_s: Mapping[str, Sequence[float]]
    """Longest pause of every stream that moved, by cause."""

    @property
    def targets(self) -> list[Target]:
        outcome = self.outcome
        return [
            Target("requests with an error", len(outcome.errors), 0),
            Target("requests with another answer", len(outcome.different), 0),
            Target("choices duplicated", outcome.duplicates, 0),
            Target("choices lost", outcome.lost, 0),
            Target("blocks, leases and groups left", sum(self.left_behind.values()), 0),
            Target("faults per minute", sum(self.injected_faults.values()) / self.minutes, 6, Bound.AT_LEAST),
        ]

    def print(self, *, check: bool) -> int:
        outcome = self.outcome
        lines = {
            "faults": ", ".join(f"{count} {kind}" for kind, count in sorted(self.injected_faults.items())),
            "finished": f"{outcome.finished} requests with {outcome.choices} choices, {outcome.identical} identical",
            "moved": f"{self.totals['migrations']} groups, {self.totals['choices_resumed']} choices",
            "errors": "; ".join(outcome.errors[:5]) or "none",
            "different": "; ".join(outcome.different[:5]) or "none",
            **{f"pause, {cause}": described(pauses) for cause, pauses in sorted(self.pauses_s.items())},
        }
        record = {name: value for name, value in asdict(self).items() if name != "machine"}
        return print_report(record, *labelled(lines), conditions=self.machine, targets=self.targets, check=check)


def described(pauses: Sequence[float]) -> str:
    """Describes the pauses of streams that moved in one line."""
    if len(pauses) < 2:
        return f"{pauses[0]:.2f} s, one stream"
    cuts = quantiles(pauses, n=100, method="inclusive")
    return f"p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, {len(pauses)} streams"


class ChaosClients:
    """Clients that send requests until the time is up, and wait for their last answers."""

    def __init__(
        self, http: httpx.AsyncClient, requests: Sequence[RepeatedRequest], expected: Sequence[ReceivedAnswer]
    ) -> None:
        self.outcome = ComparedAnswers()
        self.answers: list[ReceivedAnswer] = []
        self._http = http
        self._kinds = list(zip(requests, expected, strict=True))

    async def run(self, *, seed: int, until_s: float) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until_s:
            request, expected = dice.choice(self._kinds)
            answer = await receive_answer(self._http, request)
            self.answers.append(answer)
            self.outcome.add(request, answer, expected)


def pauses_of(answers: Sequence[ReceivedAnswer], log: str) -> dict[str, list[float]]:
    """Returns the longest pause of each streamed answer that moved, by the cause of its first move."""
    causes: dict[str, str] = {}
    for found in MOVED.finditer(log):
        causes.setdefault(found["group"], found["cause"])
    pauses: dict[str, list[float]] = {}
    for answer in answers:
        # A group of several prompts is named after its answer and its prompt.
        cause = causes.get(answer.id) or causes.get(f"{answer.id}-0") or causes.get(f"{answer.id}-1")
        gaps = [after - before for before, after in pairwise(answer.chunk_s)]
        if cause is not None and gaps:
            pauses.setdefault(cause, []).append(max(gaps))
    return pauses


@dataclass(frozen=True)
class ChaosPlan:
    """Length and load of a run."""

    minutes: float
    clients: int
    seed: int

    async def run(self, injector: FaultInjector, log: Callable[[], str]) -> ChaosReport:
        http = injector.client
        messages = [message for message, _ in message_requests(self.seed)]
        requests = [*mixed_requests(KINDS, seed=self.seed), *steered_requests(self.seed), *messages]
        expected = [await receive_answer(http, request) for request in requests]
        if failed := [answer.error for answer in expected if answer.error is not None]:
            raise SystemExit(f"a request failed before the first fault: {failed[0]}")
        clients = ChaosClients(http, requests, expected)
        injecting = asyncio.create_task(injector.run())
        until_s = time.monotonic() + self.minutes * 60
        await asyncio.gather(*(clients.run(seed=self.seed + number, until_s=until_s) for number in range(self.clients)))
        injecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await injecting
        left = await left_on_workers(http)
        totals = (await http.get("/status")).json()["totals"]
        pauses_s = pauses_of(clients.answers, log())
        return ChaosReport(machine(), self.minutes, clients.outcome, dict(injector.counts), totals, left, pauses_s)


async def over_cell(plan: ChaosPlan, model: str) -> ChaosReport:
    with ChildServer([model, *CELL]) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
            injector = FaultInjector(http, EVERY_S, CELL_FAULTS, random.Random(plan.seed))
            return await plan.run(injector, lambda: server.log)


async def over_gateway(plan: ChaosPlan, model: str) -> ChaosReport:
    async with restarted_servers(model) as servers:
        by_id = {server.id: server for server in servers}

        async def inject(worker: WorkerStatus, number: signal.Signals) -> None:
            await by_id[str(worker["id"])].inject(number)

        workers = [argument for server in servers for argument in ("--worker", server.url)]
        with ChildServer([*workers, "--worker-timeout", "3"], command="gateway") as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S) as http:
                injector = FaultInjector(http, EVERY_S, SERVER_FAULTS, random.Random(plan.seed), inject)
                return await plan.run(injector, lambda: gateway.log)


def main() -> int:
    parser = benchmark_parser("bench.chaos", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time with faults (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=6, help="number of clients (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and faults (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help="model of the servers (default: %(default)s)")
    parser.add_argument("--gateway", action="store_true", help="kill, stop and drain servers after a gateway")
    add_check(parser)
    arguments = parser.parse_args()
    plan = ChaosPlan(arguments.minutes, arguments.clients, arguments.seed)
    report = asyncio.run((over_gateway if arguments.gateway else over_cell)(plan, arguments.model))
    return report.print(check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
