"""Kills engines of a cell every few seconds under mixed load: is any answer lost, doubled, late or different?

Every kind of request is sent once undisturbed: chats, completions, messages, groups with a deterministic policy. Then
clients send them over and over while engine processes are killed and stopped, and every answer is compared with the
undisturbed one, choice by choice: text, finish reason, log-probabilities, usage, what the policy has done. In the end
nothing may be left: no block, lease or group on any engine.

    python -m bench.chaos [--gateway] [--minutes 10] [--clients 6] [--check]

Without `--gateway` it kills and stops the engine processes of a cell. With it, it kills, stops and drains whole servers
behind a gateway; they are started again under their addresses.
"""

import argparse
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

from bench.chaos.answers import Answer, Outcome, ask
from bench.chaos.faults import DRAINED, KILLED, STOPPED, Status, Striker, left_behind
from bench.chaos.mixed_requests import Request, mixed_requests
from bench.chaos.restarted_servers import kept_servers
from bench.program.report import Bound, Floor, machine, tell
from bench.soak.policy_groups import message_requests, steered_requests
from motet.deploy.child import ChildServer

KINDS = 40
EVERY_S = (2.0, 6.0)
CELL_STRIKES = {KILLED: 0.8, STOPPED: 0.2}
SERVER_STRIKES = {KILLED: 0.4, STOPPED: 0.2, DRAINED: 0.4}
TIMEOUT_S = 300.0
CELL = ("--prefill", "1", "--decode", "2", "--heartbeat-timeout", "3", "--engine-restarts", "1000")
MOVED = re.compile(r"a group goes on elsewhere .*?group=(?P<group>\S+) cause=(?P<cause>\S+)")


@dataclass(frozen=True)
class Report:
    machine: Mapping[str, str]
    minutes: float
    outcome: Outcome
    strikes: Mapping[str, int]
    totals: Mapping[str, int]
    """The totals in the server's `/status`."""
    left_behind: Mapping[str, int]
    """Sums over all engines of what should be 0 after all clients have left, by its name in `/status`."""
    pauses_s: Mapping[str, Sequence[float]]
    """By cause: the longest pause of every stream that moved."""

    @property
    def floors(self) -> list[Floor]:
        outcome = self.outcome
        return [
            Floor("requests with an error", len(outcome.errors), 0),
            Floor("requests with another answer", len(outcome.different), 0),
            Floor("choices twice", outcome.duplicates, 0),
            Floor("choices lost", outcome.lost, 0),
            Floor("blocks, leases and groups left behind", sum(self.left_behind.values()), 0),
            Floor("strikes a minute", sum(self.strikes.values()) / self.minutes, 6, Bound.AT_LEAST),
        ]

    def tell(self, *, check: bool) -> int:
        outcome = self.outcome
        lines = {
            "strikes": ", ".join(f"{count} {kind}" for kind, count in sorted(self.strikes.items())),
            "finished": f"{outcome.finished} requests with {outcome.choices} choices, {outcome.identical} identical",
            "moved": f"{self.totals['migrations']} groups, {self.totals['choices_resumed']} choices",
            "errors": "; ".join(outcome.errors[:5]) or "none",
            "different": "; ".join(outcome.different[:5]) or "none",
            **{f"pause, {cause}": described(pauses) for cause, pauses in sorted(self.pauses_s.items())},
        }
        shown = [f"{name:16} {value}" for name, value in lines.items()]
        record = {name: value for name, value in asdict(self).items() if name != "machine"}
        return tell(record, *shown, about=self.machine, floors=self.floors, check=check)


def described(pauses: Sequence[float]) -> str:
    """Describes the pauses of streams that moved in one line."""
    if len(pauses) < 2:
        return f"{pauses[0]:.2f} s, one stream"
    cuts = quantiles(pauses, n=100, method="inclusive")
    return f"p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, of {len(pauses)} streams"


class Clients:
    """Clients that send requests until the time is up, and wait for their last answers."""

    def __init__(self, http: httpx.AsyncClient, requests: Sequence[Request], expected: Sequence[Answer]) -> None:
        self.outcome = Outcome()
        self.answers: list[Answer] = []
        self._http = http
        self._kinds = list(zip(requests, expected, strict=True))

    async def run(self, *, seed: int, until_s: float) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until_s:
            request, expected = dice.choice(self._kinds)
            answer = await ask(self._http, request)
            self.answers.append(answer)
            self.outcome.add(request, answer, expected)


def pauses_of(answers: Sequence[Answer], log: str) -> dict[str, list[float]]:
    """Returns the longest pause of each answer that streamed and moved, by the first cause of its moves."""
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
class Plan:
    """The length and the load of a run."""

    minutes: float
    clients: int
    seed: int

    async def run(self, striker: Striker, log: Callable[[], str]) -> Report:
        http = striker.client
        messages = [message for message, _ in message_requests(self.seed)]
        requests = [*mixed_requests(KINDS, seed=self.seed), *steered_requests(self.seed), *messages]
        expected = [await ask(http, request) for request in requests]
        if failed := [answer.error for answer in expected if answer.error is not None]:
            raise SystemExit(f"a request failed before anything was struck: {failed[0]}")
        asking = Clients(http, requests, expected)
        striking = asyncio.create_task(striker.run())
        until_s = time.monotonic() + self.minutes * 60
        await asyncio.gather(*(asking.run(seed=self.seed + number, until_s=until_s) for number in range(self.clients)))
        striking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await striking
        left = await left_behind(http)
        totals = (await http.get("/status")).json()["totals"]
        pauses_s = pauses_of(asking.answers, log())
        return Report(machine(), self.minutes, asking.outcome, dict(striker.counts), totals, left, pauses_s)


async def over_cell(plan: Plan, model: str) -> Report:
    with ChildServer([model, *CELL]) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
            striker = Striker(http, EVERY_S, CELL_STRIKES, random.Random(plan.seed))
            return await plan.run(striker, lambda: server.log)


async def over_gateway(plan: Plan, model: str) -> Report:
    async with kept_servers(model) as servers:
        by_id = {server.id: server for server in servers}

        async def hit(worker: Status, number: signal.Signals) -> None:
            await by_id[str(worker["id"])].strike(number)

        workers = [argument for server in servers for argument in ("--worker", server.url)]
        with ChildServer([*workers, "--worker-timeout", "3"], command="gateway") as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S) as http:
                striker = Striker(http, EVERY_S, SERVER_STRIKES, random.Random(plan.seed), hit)
                return await plan.run(striker, lambda: gateway.log)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="time under strikes (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and strikes")
    parser.add_argument("--model", default="smollm2", help="model of the servers (default: %(default)s)")
    parser.add_argument("--gateway", action="store_true", help="strike at servers behind a gateway")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a floor is missed")
    arguments = parser.parse_args()
    plan = Plan(arguments.minutes, arguments.clients, arguments.seed)
    report = asyncio.run((over_gateway if arguments.gateway else over_cell)(plan, arguments.model))
    return report.tell(check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
