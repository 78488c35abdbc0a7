"""An hour of mixed traffic on a cell whose engines are killed: does anything grow, stay behind or come out wrong?

Clients send requests of every kind to every route, leave in the middle of some, ask wrongly and too much, while an
engine is killed every 20 s. Answers to seeded requests are compared with the undisturbed ones, choice by choice. After
each round the clients are gone for a moment: then nothing may be left on any engine, and a sample is taken of memory,
open files, threads, processes, temporary files and shared memory (`bench/soak/samples.py`). One decode engine is never
killed, so that an engine is sampled over the whole run too.

    python -m bench.soak [--minutes 60] [--clients 3] [--pause 1] [--single] [--check]

The server sends traces all the while; their collector is there in every second round. With `--single` it is one engine,
which nobody kills.

The first five minutes are for warming up: what grows is what grows after them. What each client does follows from the
seed; how far it comes in the time does not.
"""

import argparse
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

from bench.chaos.answers import Answer, ask
from bench.chaos.faults import KILLED, Striker, left_behind
from bench.chaos.mixed_requests import Request
from bench.program.command_line import progress
from bench.program.report import Bound, Floor, Table, columns_table, machine, tell
from bench.servers.ports import free_port
from bench.soak.clients import (
    KEY_MAX_CHOICES,
    KEY_MAX_REQUESTS,
    Client,
    Connections,
    Tally,
    Undisturbed,
    ask_undisturbed,
)
from bench.soak.samples import Sample, Watcher, slope_per_hour
from bench.soak.seeded_requests import filling_requests, wide_requests
from bench.traces import collector
from motet.deploy.child import ChildServer
from motet.grammar.compiled_grammar import MAX_KEPT_MB
from motet.settings.server_config import environment

CELL = ("--prefill", "1", "--decode", "2", "--kv-cache-gb", "0.25")
LIVES = ("--heartbeat-timeout", "5", "--engine-restarts", "9999")
SINGLE = ("--kv-cache-gb", "0.25")
NAME = "soaked"
SPARED, ONLY = "decode-1", "engine-0"
"""The engine that is never killed, in a cell and alone."""
FILLINGS = 3 * MAX_KEPT_MB
"""Number of forms sent at first, so many that each of the two decode engines has its fill of them, not only the API."""
STRIKE_EVERY_S = 20.0
SETTLED_MINUTES = 5.0
ROUND_MINUTES = 2.0
QUIET_S = 2.0
"""Time without clients before a sample."""
TIMEOUT_S = 300.0
FAULT = re.compile(r".*(?:Traceback|never retrieved|never awaited|ResourceWarning).*")
TASKS = re.compile(r"(?m)^motet:event_loop_tasks (.*)$")
MOST_MB_AN_HOUR = 10.0
"""Growth that counts as none. An hour has 4500 acts of clients, so 10 MB are 2.2 kB an act. What must not stay is more:
an open request with its text, a compiled form, the books of an engine that died."""
FEW = 5
"""Number of samples whose median counts: threads that were needed a moment ago are there for another ten seconds."""
TOLD = 12
"""Number of samples that the table shows."""

Figure = Callable[[Sample], float]
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
"""What must not be more at the end than after the first minutes."""
SPARE = {"spared engine: open files": 3, "sender of traces: open files": 1, "shared memory": 1}
"""How many more there may be: one for each prefill engine that died since the last one was met a minute ago, the
connection to a collector that is there, and a piece of shared memory that comes and goes with engines."""


@dataclass(frozen=True)
class Growth:
    """One figure after the first minutes and at the end, as medians of a few samples, and its slope between."""

    settled: float
    last: float
    per_hour: float | None


@dataclass(frozen=True)
class Report:
    machine: Mapping[str, str]
    minutes: float
    cores: float
    """Cores that the server kept busy, on average."""
    samples: Sequence[Sample]
    tally: Tally
    strikes: Mapping[str, int]
    totals: Mapping[str, int]
    """The totals in the server's `/status`."""
    faults: Sequence[str] = ()
    """Lines of the server's log that tell of an error that nobody handled."""
    after: Sequence[str] = ()
    """What was left when the server had ended: processes, temporary files, shared memory."""
    single: bool = False

    @property
    def _floors_of_strikes(self) -> list[Floor]:
        """Nobody strikes the only engine of a server."""
        strikes = sum(self.strikes.values()) / self.minutes
        return [] if self.single else [Floor("strikes a minute", strikes, 1, Bound.AT_LEAST)]

    @property
    def growth(self) -> dict[str, Growth]:
        settled_at = min(SETTLED_MINUTES, self.minutes / 3)
        later = [sample for sample in self.samples if sample.minute >= settled_at] or self.samples[-1:]
        few = min(FEW, -(-len(later) // 2))
        return {
            name: Growth(
                median(figure(sample) for sample in later[:few]),
                median(figure(sample) for sample in later[-few:]),
                slope_per_hour([(sample.minute, figure(sample)) for sample in later]),
            )
            for name, figure in GROWING.items()
        }

    @property
    def floors(self) -> list[Floor]:
        tally, growth = self.tally, self.growth
        outcome = tally.outcome
        return [
            Floor("unexpected statuses and broken answers", len(tally.unexpected) + len(outcome.errors), 0),
            Floor("wrong answers", len(outcome.different) + len(tally.malformed), 0),
            Floor("choices lost or twice", outcome.lost + outcome.duplicates, 0),
            Floor("left on engines at rest", max(sum(sample.left.values()) for sample in self.samples), 0),
            Floor("left after the server", len(self.after), 0),
            Floor("groups known after their time", len(self.tally.still_known), 0),
            Floor("errors that nobody handled, in the log", len(self.faults), 0),
            *(Floor(f"{name}, more", growth[name].last - growth[name].settled, SPARE.get(name, 0)) for name in COUNTED),
            Floor("sender of traces: MB an hour", growth["sender of traces: resident MB"].per_hour, MOST_MB_AN_HOUR),
            Floor("API process: MB an hour", growth["API process: resident MB"].per_hour, MOST_MB_AN_HOUR),
            Floor("spared engine: MB an hour", growth["spared engine: resident MB"].per_hour, MOST_MB_AN_HOUR),
            Floor("429s", tally.statuses["burst: 429"], 1, Bound.AT_LEAST),
            *self._floors_of_strikes,
        ]

    def tell(self, *, check: bool) -> int:
        outcome, tally = self.tally.outcome, self.tally
        lines = {
            "server": f"{self.cores:.2f} cores busy",
            "strikes": ", ".join(f"{count} {kind}" for kind, count in sorted(self.strikes.items())),
            "acts": ", ".join(f"{count} {kind}" for kind, count in tally.acts.most_common()),
            "compared": f"{outcome.finished} requests with {outcome.choices} choices, {outcome.identical} identical",
            "moved": f"{self.totals['migrations']} groups, {self.totals['choices_resumed']} choices",
            "transfers": f"{self.totals['transfers']}, {self.totals['transfer_bytes'] / 1e6:.0f} MB",
            "bursts": f"{tally.statuses['burst: 200']} answered, {tally.statuses['burst: 429']} refused",
            "unexpected": "; ".join([*tally.unexpected, *outcome.errors][:5]) or "none",
            "wrong": "; ".join([*outcome.different, *tally.malformed][:5]) or "none",
            "log": "; ".join(self.faults[:5]) or "no error that nobody handled",
            "left at the end": "; ".join([*self.after, *tally.still_known]) or "nothing",
        }
        shown = [samples_table(self.samples), growth_table(self.growth)]
        record = {name: value for name, value in vars(self).items() if name not in ("machine", "samples", "tally")}
        record |= {"samples": [asdict(sample) for sample in self.samples], "outcome": asdict(outcome)}
        record |= {name: value for name, value in vars(tally).items() if name != "outcome"}
        record["growth"] = {name: asdict(growth) for name, growth in self.growth.items()}
        told = [f"{name:16} {value}" for name, value in lines.items()]
        return tell(record, *told, *shown, about=self.machine, floors=self.floors, check=check)


def samples_table(samples: Sequence[Sample]) -> Table:
    heads = "minute acts API-MB files threads children tasks spared-MB files threads engines-MB tmp shm left"
    forms = ".1f d .1f d d d d .1f d d .0f d d d"
    every = max(1, len(samples) // TOLD)
    rows = [
        (
            *(one.minute, one.sent, *asdict(one.api).values(), one.tasks),
            *(one.spared.rss_mb, one.spared.files, one.spared.threads, one.engines_mb),
            *(one.temporary, one.shared, sum(one.left.values())),
        )
        for one in [*samples[:-1:every], *samples[-1:]]
    ]
    return columns_table(list(zip(heads.split(), forms.split(), strict=True)), rows)


def growth_table(growth: Mapping[str, Growth]) -> Table:
    columns = [("figure", "<"), ("after the first minutes", ".1f"), ("at the end", ".1f"), ("an hour", "+.2f")]
    return columns_table(columns, [(name, *asdict(one).values()) for name, one in growth.items()])


@dataclass(frozen=True)
class Plan:
    """The length and the load of a run."""

    minutes: float
    clients: int
    pause_s: float
    seed: int
    single: bool = False
    """True for one engine, which nobody kills."""

    async def run(self, server: ChildServer, *, keys: Sequence[str], watcher: Watcher, traces: int) -> Report:
        """Warms the server up, lets the clients go in rounds, and takes a sample after each. `traces`: the port to
        which the server sends its traces."""
        undisturbed = await self._warm_up(server.url, keys)
        progress(f"warm: {len(undisturbed.seeded)} seeded requests")
        tally = Tally()
        clients = [
            Client(tally, undisturbed, dice=random.Random(self.seed + number), pause_s=self.pause_s, model=NAME)
            for number in range(self.clients)
        ]
        strikes: Counter[str] = Counter()
        samples: list[Sample] = []
        began_s = time.monotonic()
        while True:
            minute = (time.monotonic() - began_s) / 60
            samples.append(await at_rest(server.url, keys[0], watcher=watcher, minute=minute, sent=tally.sent))
            progress(str(samples[-1]))
            if tally.unexpected or tally.outcome.errors:
                progress(f"unexpected: {[*tally.unexpected, *tally.outcome.errors][-3:]}")
            if minute >= self.minutes:
                break
            round_minutes = min(ROUND_MINUTES, max(self.minutes - minute, 0.1), self.minutes / 6)
            until_s = time.monotonic() + 60 * round_minutes
            dice = random.Random(f"{self.seed} {len(samples)}")
            with collector(traces) if len(samples) % 2 else contextlib.nullcontext():
                strikes += await self._one_round(server.url, keys, clients=clients, dice=dice, until_s=until_s)
        minutes = (time.monotonic() - began_s) / 60
        async with connections(server.url, keys[:1]) as (http,):
            totals = (await http.get("/status")).json()["totals"]
        cores = watcher.cpu_s() / 60 / minutes
        return Report(machine(), minutes, cores, samples, tally, dict(strikes), totals, single=self.single)

    async def _warm_up(self, url: str, keys: Sequence[str]) -> Undisturbed:
        """Returns what clients send, with the undisturbed answers. Also fills what is kept up to a bound, so that it
        does not look like growth later: forms, threads, the buffers of the widest step."""
        async with connections(url, keys) as owned:
            undisturbed = await ask_undisturbed(owned[0], self.seed)
            fillings = filling_requests(FILLINGS)
            shares = [(own, fillings[place :: len(owned)]) for place, own in enumerate(owned)]
            shares += [(own, [wide]) for own in owned for wide in wide_requests(KEY_MAX_REQUESTS - 1)]
            filled = await asyncio.gather(*(ask_all(own, share) for own, share in shares))
        every = chain.from_iterable(filled)
        if failed := [f"{request.name}: {answer.error}" for request, answer in every if answer.error is not None]:
            raise SystemExit("requests failed before anything was struck: " + "; ".join(failed[:5]))
        return undisturbed

    async def _one_round(
        self, url: str, keys: Sequence[str], *, clients: Sequence[Client], dice: random.Random, until_s: float
    ) -> Counter[str]:
        """Lets the clients go until then, while engines are killed. Returns the strikes. The last key is that of
        bursts."""
        async with connections(url, keys) as (*owned, burst):
            spared = frozenset({SPARED, ONLY})
            striker = Striker(owned[0], (STRIKE_EVERY_S, STRIKE_EVERY_S), {KILLED: 1.0}, dice, spared=spared)
            striking = asyncio.create_task(striker.run())
            try:
                async with asyncio.TaskGroup() as going:
                    for client, own in zip(clients, owned, strict=True):
                        going.create_task(client.run(Connections(own, burst), until_s=until_s))
            finally:
                striking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await striking
            await asyncio.gather(*(one.check_forgotten(own) for one, own in zip(clients, owned, strict=True)))
        return striker.counts


async def ask_all(http: httpx.AsyncClient, requests: Sequence[Request]) -> list[tuple[Request, Answer]]:
    return [(request, await ask(http, request)) for request in requests]


async def at_rest(url: str, key: str, *, watcher: Watcher, minute: float, sent: int) -> Sample:
    """Waits until the engines are ready and empty, and a little longer, and takes a sample."""
    async with connections(url, [key]) as (http,):
        left = await left_behind(http)
    await asyncio.sleep(QUIET_S)
    async with connections(url, [key]) as (http,):
        workers = (await http.get("/status")).json()["workers"]
        tasks = float(TASKS.findall((await http.get("/metrics")).text)[0])
    await asyncio.sleep(QUIET_S / 4)
    return watcher.sample(workers, tasks=int(tasks), minute=minute, sent=sent, left=left)


@contextlib.asynccontextmanager
async def connections(url: str, keys: Sequence[str]) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Opens a client for each key, and closes all connections at the end."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {key}"})
            )
            for key in keys
        ]


def soak(plan: Plan, model: str) -> Report:
    """Starts a cell, runs the plan, and looks at what is left when the cell has ended."""
    keys = [f"key-{number}" for number in range(plan.clients)] + ["key-of-bursts"]
    limits = ("--key-max-requests", str(KEY_MAX_REQUESTS), "--key-max-choices", str(KEY_MAX_CHOICES))
    known = [part for key in keys for part in ("--api-key", key)]
    engines, spared = (SINGLE, ONLY) if plan.single else ((*CELL, *LIVES), SPARED)
    traces = free_port()
    sent = ("--otlp-endpoint", f"http://127.0.0.1:{traces}")
    arguments = [model, "--served-model-name", NAME, *engines, *limits, *known, *sent]
    with tempfile.TemporaryDirectory() as temporary:
        with ChildServer(arguments, environ={**environment(), "TMPDIR": temporary}) as server:
            watcher = Watcher(server.pid, Path(temporary), spared=spared)
            report = asyncio.run(plan.run(server, keys=keys, watcher=watcher, traces=traces))
            faults = FAULT.findall(server.log)
        after = [*watcher.alive(), *watcher.temporary(), *watcher.shared()]
    return replace(report, after=after, faults=faults)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="time under traffic (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=3, help="things that go on at a time (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=1.0, help="mean pause of a client in seconds (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and strikes")
    parser.add_argument("--model", default="smollm2", help="model of the cell (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a floor is missed")
    parser.add_argument("--single", action="store_true", help="one engine, which nobody kills")
    arguments = parser.parse_args(argv)
    plan = Plan(arguments.minutes, arguments.clients, arguments.pause, arguments.seed, arguments.single)
    return soak(plan, arguments.model).tell(check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
