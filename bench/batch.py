"""Measures a completions request with a whole rollout batch: hundreds of prompts, as token ids, with n choices each.

The server runs in a process of its own: the API over a scripted engine (`bench.frontend.scripted_engine`), which runs
as many choices at once as a real one, or with `--real` over the default model. One request is answered whole, one
streamed, each with token ids and log-probabilities. "peak" is the most memory of the API process while it answers;
"lag" is how late a task of its event loop wakes that sleeps for a millisecond, as in `bench.hostile`. Prints a table,
the goal, and JSON on the last line.

Run: python -m bench.batch [--sizes 512x16,2048x8] [--prompt-tokens 200] [--max-tokens 32] [--repeats 3] [--real]
    [--check]
"""

import argparse
import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from bench.frontend.measured_server import Limits, serve, serve_real
from bench.frontend.scripted_engine import VOCAB_SIZE
from bench.hostile.__main__ import MOST_LAG_MS, collect, watching
from bench.results.report import Floor, machine, table, tell

LIMITS = Limits(max_choices=2**16, max_waiting_groups=2**13, queue_timeout_s=3600.0, max_num_seqs=256)
READ_BYTES = 1 << 20
SETTLE_S = 0.5
"""The kernel holds a process up for 100 ms when its peak is forgotten."""
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """A batch: so many prompts, and so many choices of each."""

    prompts: int
    n: int

    @classmethod
    def of(cls, text: str) -> "Size":
        prompts, _, n = text.partition("x")
        return cls(int(prompts), int(n))

    def __str__(self) -> str:
        return f"{self.prompts} x {self.n}"

    def body(self, *, prompt_tokens: int, max_tokens: int, stream: bool) -> bytes:
        draw = random.Random(1)
        fields = {
            "prompt": [[draw.randrange(100, VOCAB_SIZE) for _ in range(prompt_tokens)] for _ in range(self.prompts)],
            "n": self.n,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "seed": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": stream,
        }
        return json.dumps(fields).encode()


@dataclass(frozen=True)
class Cost:
    """What one request cost the server, and when its answer came."""

    first_s: float
    """Seconds until the first byte of the answer's body."""
    total_s: float
    answer_mib: float
    before_mib: float
    """Memory of the process before the request."""
    peak_mib: float
    """Most memory of the process from the request to its answer's end."""
    lag_max_ms: float


def least_disturbed(costs: Sequence[Cost]) -> Cost:
    """Returns the cost of the time with the least lag: other work on the machine can only add to it."""
    return min(costs, key=lambda cost: cost.lag_max_ms)


def memory_mib(pid: int, name: str) -> float:
    """Returns a figure of Linux about a process: VmRSS is its memory, VmHWM the most since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(url: str, pid: int, lags: list[tuple[float, float]], *, body: bytes) -> Cost:
    """`lags` are added by another thread."""
    forget_peak(pid)
    time.sleep(SETTLE_S)
    before, began = memory_mib(pid, "VmRSS"), time.monotonic()
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        num_bytes = len(response.read(1))
        first = time.monotonic()
        while piece := response.read1(READ_BYTES):
            num_bytes += len(piece)
            last = piece
    ended = time.monotonic()
    if response.status != 200 or not last.rstrip().endswith((b"}", b"[DONE]")):
        raise AssertionError(f"the server answered {response.status}, and at the end {last[-300:]!r}")
    peak = memory_mib(pid, "VmHWM")
    while not lags or lags[-1][0] < ended:  # they come in pieces
        time.sleep(0.01)
    lag = max(late for woke, late in list(lags) if began < woke <= ended + 0.05)
    return Cost(first - began, ended - began, num_bytes / MIB, before, peak, 1000 * lag)


@contextmanager
def running(*, real: bool) -> Iterator[tuple[str, int, list[tuple[float, float]]]]:
    """Runs a server, and yields its URL, its process, and the lags of its loop, to which a thread adds."""
    command = [sys.executable, "-m", "bench.batch", "--serve", *(["--real"] if real else [])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None and server.stdin is not None  # they are pipes
        lines = iter(server.stdout)
        url = next(line.strip() for line in lines if line.startswith("http"))
        lags: list[tuple[float, float]] = []
        reading = threading.Thread(target=collect, args=(lines, lags))
        reading.start()
        try:
            yield url, server.pid, lags
        finally:
            server.stdin.close()  # it ends then
            reading.join()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="512x16,2048x8", help="prompts and n of each batch")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of a choice")
    parser.add_argument("--repeats", type=int, default=3, help="servers and requests for each; the best one counts")
    parser.add_argument("--real", action="store_true", help="the default model in place of the scripted engine")
    parser.add_argument("--check", action="store_true", help="fail when the goal is missed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        with_lags = watching(serve_real(LIMITS) if arguments.real else serve("motet", limits=LIMITS))
        uvloop.run(with_lags)
        return 0
    found: dict[str, Cost] = {}
    for size in map(Size.of, arguments.sizes.split(",")):
        for stream in (False, True):
            body = size.body(prompt_tokens=arguments.prompt_tokens, max_tokens=arguments.max_tokens, stream=stream)
            costs = []
            for _ in range(arguments.repeats):
                with running(real=arguments.real) as (url, pid, lags):
                    costs.append(measure(url, pid, lags, body=body))
            found[f"{size}, {'streamed' if stream else 'whole'}"] = least_disturbed(costs)
    columns = [
        ("batch", "<"),
        *((name, ".2f") for name in ("first byte s", "total s")),
        *((name, ".0f") for name in ("answer MiB", "memory before", "peak", "lag max ms")),
    ]
    worst = Floor("greatest lag, ms", max(cost.lag_max_ms for cost in found.values()), MOST_LAG_MS)
    rows = [(name, *asdict(cost).values()) for name, cost in found.items()]
    record = {name: asdict(cost) for name, cost in found.items()}
    return tell(record, table(columns, rows), about=machine(), floors=[worst], check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
