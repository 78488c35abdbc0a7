"""Runs an hour of mixed traffic on a cell whose engines are killed: does anything grow, remain or come out wrong?

Clients send requests of every kind to every route, disconnect in the middle of some, and send invalid and too many
requests, while an engine is killed every 20 s. Answers to seeded requests are compared with the answers without faults,
choice by choice. After each round the clients pause: then nothing must remain on any engine, and a sample is taken of
memory, open files, threads, processes, temporary files and shared memory (`bench/soak/samples.py`). One decode engine
is never killed, so that an engine is sampled over the entire run too.

    python -m bench.soak [--minutes 60] [--clients 3] [--pause 1] [--single] [--check]

The server always sends traces; their collector runs in every second round. With `--single` the server has one engine,
which is not killed.

The first five minutes are a warm-up: growth is measured after them. The order of each client's acts follows from the
seed; the number of acts depends on the time.
"""

import asyncio
import contextlib
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median

import httpx

from bench.chaos.faults import KILLED, FaultInjector, left_on_workers
from bench.chaos.mixed_requests import RepeatedRequest
from bench.chaos.received_answers import ReceivedAnswer, receive_answer
from bench.program.command_line import add_check, benchmark_parser, progress
from bench.program.report import Bound, Table, Target, labelled, machine, print_report, table
from bench.servers.ports import free_port
from bench.soak.samples import ServerSample, ServerWatcher, slope_per_hour
from bench.soak.seeded_requests import filling_requests, wide_requests
from bench.soak.soak_client import (
    KEY_MAX_CHOICES,
    KEY_MAX_REQUESTS,
    ClientConnections,
    ExpectedAnswers,
    SoakClient,
    Tally,
    collect_expected,
)
from bench.traces import collector
from motet.deploy.child import ChildServer
from motet.grammar.compiled_grammar import MAX_CACHED_MB
from motet.settings.server_config import environment

CELL = ("--prefill", "1", "--decode", "2", "--kv-cache-gb", "0.25")
RESTARTS = ("--heartbeat-timeout", "5", "--engine-restarts", "9999")
SINGLE = ("--kv-cache-gb", "0.25")
NAME = "soaked"
SPARED, ONLY = "decode-1", "engine-0"
"""Ids of the engine that is never killed: in a cell, and on a server with one engine."""
FILLINGS = 3 * MAX_CACHED_MB
"""Number of grammars sent at first: enough to fill the caches of both decode engines and of the API process."""
FAULT_EVERY_S = 20.0
SETTLED_MINUTES = 5.0
ROUND_MINUTES = 2.0
QUIET_S = 2.0
"""Pause without clients before a sample."""
TIMEOUT_S = 300.0
LOGGED_ERROR = re.compile(r".*(?:Traceback|never retrieved|never awaited|ResourceWarning).*")
TASKS = re.compile(r"(?m)^motet:event_loop_tasks (.*)$")
MAX_MB_AN_HOUR = 10.0
"""Growth that is tolerated. An hour has 4500 acts of clients, so 10 MB are 2.2 kB per act. Everything that must not
remain is larger: an open request with its text, a compiled grammar, the accounting of an engine that died."""
FEW = 5
"""Number of samples whose median counts, because threads that were needed before remain for another ten seconds."""
SHOWN_SAMPLES = 12
"""Number of samples in the table."""

Figure = Callable[[ServerSample], float]
GROWING: Mapping[str, Figure] = {
    "API process: resident MB": lambda sample: sample.api.rss_mb,
    "API process: open files": lambda sample: sample.api.files,
    "API process: threads": lambda sample: sample.api.threads,
    "API process: children": lambda sample: sample.api.children,
    "API process: tasks": lambda sample: sample.tasks,
    "spared engine: resident MB": lambda sample: sample.spared.rss_mb,
    "spared engine: open files": lambda sample: sample.spared.files,
    "spared engine: threads": lambda sample: sample.spared.threads,
    "all engines: resident MB": lambda sample: sample.engines_mb,
    "sender of traces: resident MB": lambda sample: sample.sender.rss_mb,
    "sender of traces: open files": lambda sample: sample.sender.files,
    "sender of traces: threads": lambda sample: sample.sender.threads,
    "temporary files": lambda sample: sample.temporary,
    "shared memory": lambda sample: sample.shared,
}
COUNTED = tuple(name for name in GROWING if "resident" not in name)
"""Figures that must not be higher at the end than after the first minutes."""
SPARE = {"spared engine: open files": 3, "sender of traces: open files": 1, "shared memory": 1}
"""Tolerated differences: one file for each prefill engine that died since the connection to the last one a minute ago,
the connection to a collector that runs, and a piece of shared memory that comes and goes with engines."""


@dataclass(frozen=True)
class FigureGrowth:
    """A figure after the first minutes and at the end, as medians of a few samples, and its slope between them."""

    settled: float
    last: float
    per_hour: float | None


@dataclass(frozen=True)
class SoakReport:
    machine: Mapping[str, str]
    minutes: float
    cores: float
    """Mean number of cores that the server kept busy."""
    samples: Sequence[ServerSample]
    tally: Tally
    injected_faults: Mapping[str, int]
    """Number of faults by role of the worker and kind of fault."""
    totals: Mapping[str, int]
    """The totals in the server's `/status`."""
    logged_errors: Sequence[str] = ()
    """Lines of the server's log about an unhandled error."""
    after: Sequence[str] = ()
    """Processes, temporary files and shared memory that remain after the server has ended."""
    single: bool = False

    @property
    def _fault_targets(self) -> list[Target]:
        """Returns no target for a single engine, which gets no faults."""
        injected_faults = sum(self.injected_faults.values()) / self.minutes
        return [] if self.single else [Target("faults per minute", injected_faults, 1, Bound.AT_LEAST)]

    @property
    def growth(self) -> dict[str, FigureGrowth]:
        settled_at = min(SETTLED_MINUTES, self.minutes / 3)
        later = [sample for sample in self.samples if sample.minute >= settled_at] or self.samples[-1:]
        few = min(FEW, -(-len(later) // 2))
        return {
            name: FigureGrowth(
                median(figure(sample) for sample in later[:few]),
                median(figure(sample) for sample in later[-few:]),
                slope_per_hour([(sample.minute, figure(sample)) for sample in later]),
            )
            for name, figure in GROWING.items()
        }

    @property
    def targets(self) -> list[Target]:
        tally, growth = self.tally, self.growth
        outcome = tally.outcome
        return [
            Target("unexpected statuses and broken answers", len(tally.unexpected) + len(outcome.errors), 0),
            Target("wrong answers", len(outcome.different) + len(tally.malformed), 0),
            Target("choices lost or duplicated", outcome.lost + outcome.duplicates, 0),
            Target("left on engines at rest", max(sum(sample.left.values()) for sample in self.samples), 0),
            Target("left after the server", len(self.after), 0),
            Target("groups known after their time", len(self.tally.still_known), 0),
            Target("unhandled errors in the log", len(self.logged_errors), 0),
            *(
                Target(f"{name}, more", growth[name].last - growth[name].settled, SPARE.get(name, 0))
                for name in COUNTED
            ),
            Target("sender of traces: MB an hour", growth["sender of traces: resident MB"].per_hour, MAX_MB_AN_HOUR),
            Target("API process: MB an hour", growth["API process: resident MB"].per_hour, MAX_MB_AN_HOUR),
            Target("spared engine: MB an hour", growth["spared engine: resident MB"].per_hour, MAX_MB_AN_HOUR),
            Target("429s", tally.statuses["burst: 429"], 1, Bound.AT_LEAST),
            *self._fault_targets,
        ]

    def print(self, *, check: bool) -> int:
        outcome, tally = self.tally.outcome, self.tally
        lines = {
            "server": f"{self.cores:.2f} cores busy",
            "faults": ", ".join(f"{count} {kind}" for kind, count in sorted(self.injected_faults.items())),
            "acts": ", ".join(f"{count} {kind}" for kind, count in tally.acts.most_common()),
            "compared": f"{outcome.finished} requests with {outcome.choices} choices, {outcome.identical} identical",
            "moved": f"{self.totals['migrations']} groups, {self.totals['choices_resumed']} choices",
            "transfers": f"{self.totals['transfers']}, {self.totals['transfer_bytes'] / 1e6:.0f} MB",
            "bursts": f"{tally.statuses['burst: 200']} answered, {tally.statuses['burst: 429']} refused",
            "unexpected": "; ".join([*tally.unexpected, *outcome.errors][:5]) or "none",
            "wrong": "; ".join([*outcome.different, *tally.malformed][:5]) or "none",
            "log": "; ".join(self.logged_errors[:5]) or "no unhandled error",
            "left at the end": "; ".join([*self.after, *tally.still_known]) or "nothing",
        }
        record = {name: value for name, value in vars(self).items() if name not in ("machine", "samples", "tally")}
        record |= {"samples": [asdict(sample) for sample in self.samples], "outcome": asdict(outcome)}
        record |= {name: value for name, value in vars(tally).items() if name != "outcome"}
        record["growth"] = {name: asdict(growth) for name, growth in self.growth.items()}
        tables = (samples_table(self.samples), growth_table(self.growth))
        return print_report(
            record, *labelled(lines), *tables, conditions=self.machine, targets=self.targets, check=check
        )


def samples_table(samples: Sequence[ServerSample]) -> Table:
    every = max(1, len(samples) // SHOWN_SAMPLES)
    return table(
        [
            ("minute", sample.minute, ".1f"),
            ("acts", sample.sent, "d"),
            ("API MB", sample.api.rss_mb, ".1f"),
            ("files", sample.api.files, "d"),
            ("threads", sample.api.threads, "d"),
            ("children", sample.api.children, "d"),
            ("tasks", sample.tasks, "d"),
            ("spared MB", sample.spared.rss_mb, ".1f"),
            ("files", sample.spared.files, "d"),
            ("threads", sample.spared.threads, "d"),
            ("engines MB", sample.engines_mb, ".0f"),
            ("tmp", sample.temporary, "d"),
            ("shm", sample.shared, "d"),
            ("left", sum(sample.left.values()), "d"),
        ]
        for sample in [*samples[:-1:every], *samples[-1:]]
    )


def growth_table(growth: Mapping[str, FigureGrowth]) -> Table:
    return table(
        [
            ("figure", name, "<"),
            ("after the first minutes", figure.settled, ".1f"),
            ("at the end", figure.last, ".1f"),
            ("per hour", figure.per_hour, "+.2f"),
        ]
        for name, figure in growth.items()
    )


@dataclass(frozen=True)
class SoakPlan:
    """Length and load of a run."""

    minutes: float
    clients: int
    pause_s: float
    seed: int
    single: bool = False
    """True for one engine, which gets no faults."""

    async def run(self, server: ChildServer, *, keys: Sequence[str], watcher: ServerWatcher, traces: int) -> SoakReport:
        """Warms the server up, runs the clients in rounds, and takes a sample after each round. `traces` is the port to
        which the server sends its traces."""
        expected = await self._warm_up(server.url, keys)
        progress(f"warm: {len(expected.seeded)} seeded requests")
        tally = Tally()
        clients = [
            SoakClient(tally, expected, dice=random.Random(self.seed + number), pause_s=self.pause_s, model=NAME)
            for number in range(self.clients)
        ]
        injected_faults: Counter[str] = Counter()
        samples: list[ServerSample] = []
        began_s = time.monotonic()
        while True:
            minute = (time.monotonic() - began_s) / 60
            samples.append(await sample_at_rest(server.url, keys[0], watcher=watcher, minute=minute, sent=tally.sent))
            progress(str(samples[-1]))
            if tally.unexpected or tally.outcome.errors:
                progress(f"unexpected: {[*tally.unexpected, *tally.outcome.errors][-3:]}")
            if minute >= self.minutes:
                break
            round_minutes = min(ROUND_MINUTES, max(self.minutes - minute, 0.1), self.minutes / 6)
            until_s = time.monotonic() + 60 * round_minutes
            dice = random.Random(f"{self.seed} {len(samples)}")
            with collector(traces) if len(samples) % 2 else contextlib.nullcontext():
                injected_faults += await self._run_round(server.url, keys, clients=clients, dice=dice, until_s=until_s)
        minutes = (time.monotonic() - began_s) / 60
        async with open_clients(server.url, keys[:1]) as (http,):
            totals = (await http.get("/status")).json()["totals"]
        cores = watcher.cpu_s() / 60 / minutes
        return SoakReport(machine(), minutes, cores, samples, tally, dict(injected_faults), totals, single=self.single)

    async def _warm_up(self, url: str, keys: Sequence[str]) -> ExpectedAnswers:
        """Returns the repeated requests with their answers without faults. Also fills everything that is kept up to a
        bound, so that it does not look like growth later: grammars, threads, the buffers of the widest step."""
        async with open_clients(url, keys) as clients:
            expected = await collect_expected(clients[0], self.seed)
            fillings = filling_requests(FILLINGS)
            shares = [(http, fillings[place :: len(clients)]) for place, http in enumerate(clients)]
            shares += [(http, [wide]) for http in clients for wide in wide_requests(KEY_MAX_REQUESTS - 1)]
            filled = await asyncio.gather(*(receive_all(http, share) for http, share in shares))
        every = chain.from_iterable(filled)
        if failed := [f"{request.name}: {answer.error}" for request, answer in every if answer.error is not None]:
            raise SystemExit("requests failed before the first fault: " + "; ".join(failed[:5]))
        return expected

    async def _run_round(
        self, url: str, keys: Sequence[str], *, clients: Sequence[SoakClient], dice: random.Random, until_s: float
    ) -> Counter[str]:
        """Runs the clients until `until_s`, while engines are killed. Returns the number of faults by kind. The last
        key is for bursts."""
        async with open_clients(url, keys) as (*own, burst):
            spared = frozenset({SPARED, ONLY})
            injector = FaultInjector(own[0], (FAULT_EVERY_S, FAULT_EVERY_S), {KILLED: 1.0}, dice, spared=spared)
            injecting = asyncio.create_task(injector.run())
            try:
                async with asyncio.TaskGroup() as running:
                    for client, http in zip(clients, own, strict=True):
                        running.create_task(client.run(ClientConnections(http, burst), until_s=until_s))
            finally:
                injecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await injecting
            await asyncio.gather(*(client.check_forgotten(http) for client, http in zip(clients, own, strict=True)))
        return injector.counts


async def receive_all(
    http: httpx.AsyncClient, requests: Sequence[RepeatedRequest]
) -> list[tuple[RepeatedRequest, ReceivedAnswer]]:
    return [(request, await receive_answer(http, request)) for request in requests]


async def sample_at_rest(url: str, key: str, *, watcher: ServerWatcher, minute: float, sent: int) -> ServerSample:
    """Waits until the engines are ready and empty, and a little longer, and takes a sample."""
    async with open_clients(url, [key]) as (http,):
        left = await left_on_workers(http)
    await asyncio.sleep(QUIET_S)
    async with open_clients(url, [key]) as (http,):
        workers = (await http.get("/status")).json()["workers"]
        tasks = float(TASKS.findall((await http.get("/metrics")).text)[0])
    await asyncio.sleep(QUIET_S / 4)
    return watcher.sample(workers, tasks=int(tasks), minute=minute, sent=sent, left=left)


@contextlib.asynccontextmanager
async def open_clients(url: str, keys: Sequence[str]) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Opens a client for each key, and closes all connections at the end."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {key}"})
            )
            for key in keys
        ]


def soak(plan: SoakPlan, model: str) -> SoakReport:
    """Starts a cell, runs the plan, and checks what remains after the cell has ended."""
    keys = [f"key-{number}" for number in range(plan.clients)] + ["key-of-bursts"]
    limits = ("--key-max-requests", str(KEY_MAX_REQUESTS), "--key-max-choices", str(KEY_MAX_CHOICES))
    key_flags = [part for key in keys for part in ("--api-key", key)]
    engines, spared = (SINGLE, ONLY) if plan.single else ((*CELL, *RESTARTS), SPARED)
    traces = free_port()
    trace_flags = ("--otlp-endpoint", f"http://127.0.0.1:{traces}")
    arguments = [model, "--served-model-name", NAME, *engines, *limits, *key_flags, *trace_flags]
    with tempfile.TemporaryDirectory() as temporary:
        with ChildServer(arguments, environ={**environment(), "TMPDIR": temporary}) as server:
            watcher = ServerWatcher(server.pid, Path(temporary), spared=spared)
            report = asyncio.run(plan.run(server, keys=keys, watcher=watcher, traces=traces))
            logged_errors = LOGGED_ERROR.findall(server.log)
        after = [*watcher.alive(), *watcher.temporary(), *watcher.shared()]
    return replace(report, after=after, logged_errors=logged_errors)


def main(argv: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("bench.soak", __doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="time with traffic (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=3, help="number of clients (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=1.0, help="mean pause of a client in seconds (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and faults (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help="model of the cell (default: %(default)s)")
    add_check(parser)
    parser.add_argument("--single", action="store_true", help="run one engine, without faults")
    arguments = parser.parse_args(argv)
    plan = SoakPlan(arguments.minutes, arguments.clients, arguments.pause, arguments.seed, arguments.single)
    return soak(plan, arguments.model).print(check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
