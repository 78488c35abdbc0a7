"""Measures what hostile clients of a real engine cost an ordinary one: its first tokens, and the steps of its stream.

Each client has an API key. The ordinary client sends small requests, one after another, and streams one long answer,
first alone and then next to each kind of hostile load, which four clients cause with small requests:

    overflow        n = 250 and 8,000 tokens: the choices outgrow the KV cache
    wide groups     n = 256 again and again, next to a stream of the same client
    many prompts    250 prompts of 1,000 tokens in one request
    long prompts    prompts of 8,000 tokens, one after another
    drafts          a long prompt of few tokens, whose drafts are rejected
    all of them     a different load of each client

Run: python -m bench.hostile --engine [--seconds 20] [--check]
"""

import itertools
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import httpx

from bench.program.command_line import progress
from bench.program.report import Cells, Target, machine, print_report, table
from bench.servers.motet_server import KV_CACHE_GB
from motet.deploy.child import ChildServer

ORDINARY = "ordinary"
NICENESS = 10
"""Niceness of the hostile clients, which in reality run on other machines: their CPU time is not the server's work."""
HOSTILE = tuple(f"hostile{number}" for number in range(4))
MAX_FIRST_TOKEN_S = 1.5
MAX_MEDIAN_RATIO = 2.0
MAX_STEP_RATIO = 6.0
"""A step may take four times as long as one without rows, and a chunk of at least four prompt tokens comes on top."""
PAUSE_S = 0.25
"""Pause between two small requests."""
SETTLE_S = 4.0
Send = Callable[..., httpx.Response]
Load = Callable[[Send], None]


@dataclass(frozen=True)
class Service:
    """The service that the ordinary client got."""

    load: str
    first_tokens_s: Sequence[float]
    step_ms: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.first_tokens_s)

    @property
    def longest_s(self) -> float:
        return max(self.first_tokens_s)

    def cells(self, alone: "Service") -> Cells:
        return [
            ("hostile load", self.load, "<"),
            ("requests", len(self.first_tokens_s), "d"),
            ("first token ms", 1000 * self.median_s, ".0f"),
            ("ratio", self.median_s / alone.median_s, ".2f"),
            ("max ms", 1000 * self.longest_s, ".0f"),
            ("step ms", self.step_ms, ".1f"),
            ("ratio", self.step_ms / alone.step_ms, ".2f"),
        ]


def prompt_of(length: int, tokens: Sequence[int] = ()) -> list[int]:
    return [random.choice(tokens) if tokens else random.randrange(1000, 40_000) for _ in range(length)]


def overflow(send: Send) -> None:
    send(prompt=prompt_of(4), n=250, max_tokens=8000, ignore_eos=True, stream=True)


def wide_groups(send: Send) -> None:
    stream = {"prompt": prompt_of(4), "max_tokens": 8000, "ignore_eos": True, "stream": True}
    threading.Thread(target=lambda: send(**stream), daemon=True).start()
    while True:
        send(prompt=prompt_of(4), n=256, max_tokens=1)


def many_prompts(send: Send) -> None:
    send(prompt=[prompt_of(1000) for _ in range(250)], max_tokens=1)


def long_prompts(send: Send) -> None:
    send(prompt=prompt_of(8000), max_tokens=1)


def rejected_drafts(send: Send) -> None:
    few = prompt_of(6)
    sampling = {"allowed_token_ids": few, "temperature": 1.5, "ignore_eos": True}
    send(prompt=prompt_of(7000, few), n=3, max_tokens=1000, stream=True, **sampling)


LOADS: dict[str, tuple[Load, ...]] = {
    "overflow": (overflow,),
    "wide groups": (wide_groups,),
    "many prompts": (many_prompts,),
    "long prompts": (long_prompts,),
    "drafts": (rejected_drafts,),
    "all of them": (overflow, wide_groups, many_prompts, long_prompts),
}


def sender(url: str, key: str) -> Send:
    """Returns a function that sends a completions request with a key, and reads its answer."""

    def send(**body: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=600) as response:
            for _ in response.iter_raw():
                pass
            return response

    return send


def attack(url: str, load: str) -> None:
    """Lets each hostile client cause one of the loads, again and again, until the process is killed."""
    os.nice(NICENESS)

    def repeat(key: str, cause: Load) -> None:
        send = sender(url, key)
        while True:
            with suppress(httpx.HTTPError):
                cause(send)
            time.sleep(0.05)

    pairs = zip(HOSTILE, itertools.cycle(LOADS[load]), strict=False)
    threads = [threading.Thread(target=repeat, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()


@contextmanager
def hostile_clients(url: str, load: str) -> Iterator[None]:
    """Runs the hostile clients in a separate process, whose work does not delay the measurement, until the end of the
    context."""
    process = multiprocessing.get_context("spawn").Process(target=attack, args=(url, load))
    process.start()
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        process.kill()
        process.join()


def chunk_times(url: str, *, max_tokens: int, seconds: float) -> list[float]:
    """Streams one choice, for at most that many seconds after its first token, and returns the times of its chunks."""
    body = {"prompt": prompt_of(30), "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers, times = {"authorization": f"Bearer {ORDINARY}"}, list[float]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                if times[-1] > times[0] + seconds:
                    break
    return times


def measured(url: str, load: str, *, seconds: float) -> Service:
    """Sends small requests for that many seconds, and then streams an answer for the same time."""
    first_tokens_s, deadline_s = [], time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        start_s = time.monotonic()
        first_tokens_s.append(chunk_times(url, max_tokens=3, seconds=seconds)[0] - start_s)
        time.sleep(PAUSE_S)
    times = chunk_times(url, max_tokens=8000, seconds=seconds)
    return Service(load, first_tokens_s, 1000 * (times[-1] - times[0]) / (len(times) - 1))


def report(*, seconds: float, check: bool) -> int:
    keys = [f"--api-key={key}" for key in (ORDINARY, *HOSTILE)]
    services = []
    for load, loads in [("none", ()), *LOADS.items()]:
        progress(f"{load} ...")
        with ChildServer(["smollm2", "--kv-cache-gb", KV_CACHE_GB, *keys]) as server:
            measured(server.url, load, seconds=1.0)
            if not loads:
                services.append(measured(server.url, load, seconds=seconds))
                continue
            with hostile_clients(server.url, load):
                services.append(measured(server.url, load, seconds=seconds))
    alone, *others = services
    targets = [
        Target("longest first token, s", max(one.longest_s for one in others), MAX_FIRST_TOKEN_S),
        Target("median first token / alone", max(one.median_s for one in others) / alone.median_s, MAX_MEDIAN_RATIO),
        Target("step / alone", max(one.step_ms for one in others) / alone.step_ms, MAX_STEP_RATIO),
    ]
    shown = table(one.cells(alone) for one in services)
    record = {one.load: asdict(one) for one in services}
    return print_report(record, shown, conditions=machine(), targets=targets, check=check)
