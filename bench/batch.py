"""Measures one completions request with a rollout batch: hundreds of prompts, as token ids, with n choices each.

The server runs in a separate process: the API over a scripted engine (`bench.frontend.scripted_engine`), which runs as
many choices at once as a real engine, or with `--real` over the default model. One request is not streamed, one is
streamed; both request token ids and log-probabilities. "peak" is the maximum memory of the API process during the
answer. "lag" is how late the event loop wakes a task that sleeps for a millisecond, as in `bench.hostile`. Prints a
table, the target, and JSON on the last line.

Run: python -m bench.batch [--sizes 512x16,2048x8] [--prompt-tokens 200] [--max-tokens 32] [--repeats 3] [--real]
    [--check]
"""

import argparse
import contextlib
import http.client
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from bench.frontend.measured_server import Limits, serve, serve_real
from bench.frontend.scripted_engine import VOCAB_SIZE
from bench.hostile.loop_lag import MAX_LAG_MS, LagServer, lag_server, print_lags
from bench.program.command_line import add_check, benchmark_parser
from bench.program.report import Cells, Target, machine, print_report, table

LIMITS = Limits(max_choices=2**16, max_waiting_groups=2**13, queue_timeout_s=3600.0, max_num_seqs=256)
READ_BYTES = 1 << 20
SETTLE_S = 0.5
"""Pause after the reset of the peak, for which the kernel stops the process for 100 ms."""
MIB = 2**20


@dataclass(frozen=True)
class BatchSize:
    """The number of prompts of a batch, and the number of choices of each prompt."""

    prompts: int
    n: int

    @classmethod
    def of(cls, text: str) -> "BatchSize":
        prompts, _, n = text.partition("x")
        return cls(int(prompts), int(n))

    def __str__(self) -> str:
        return f"{self.prompts} x {self.n}"

    def body(self, *, prompt_tokens: int, max_tokens: int, stream: bool) -> bytes:
        dice = random.Random(1)
        fields = {
            "prompt": [[dice.randrange(100, VOCAB_SIZE) for _ in range(prompt_tokens)] for _ in range(self.prompts)],
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
class BatchCost:
    """Times and memory of one request."""

    first_s: float
    """Seconds until the first byte of the answer's body."""
    total_s: float
    answer_mib: float
    before_mib: float
    """Memory of the process before the request."""
    peak_mib: float
    """Maximum memory of the process from the request to the end of the answer."""
    lag_max_ms: float

    def cells(self, name: str) -> Cells:
        return [
            ("batch", name, "<"),
            ("first byte s", self.first_s, ".2f"),
            ("total s", self.total_s, ".2f"),
            ("answer MiB", self.answer_mib, ".0f"),
            ("memory before", self.before_mib, ".0f"),
            ("peak", self.peak_mib, ".0f"),
            ("max lag ms", self.lag_max_ms, ".0f"),
        ]


def least_disturbed(costs: Sequence[BatchCost]) -> BatchCost:
    """Returns the cost with the least lag, because other work on the machine can only add to it."""
    return min(costs, key=lambda cost: cost.lag_max_ms)


def memory_mib(pid: int, name: str) -> float:
    """Returns a field of Linux's process status: VmRSS is the memory now, VmHWM the maximum since `reset_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(server: LagServer, *, body: bytes) -> BatchCost:
    """Sends one request, and reads the answer to its end."""
    reset_peak(server.pid)
    time.sleep(SETTLE_S)
    before, start = memory_mib(server.pid, "VmRSS"), time.monotonic()
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
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
        raise AssertionError(f"status {response.status}, and the answer ends with {last[-300:]!r}")
    peak = memory_mib(server.pid, "VmHWM")
    return BatchCost(first - start, ended - start, num_bytes / MIB, before, peak, server.max_lag_ms(start, ended))


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser("bench.batch", __doc__)
    parser.add_argument("--sizes", default="512x16,2048x8", help="prompts x n of each batch")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="number of tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="number of tokens of a choice")
    parser.add_argument("--repeats", type=int, default=3, help="number of measurements, each with a new server")
    parser.add_argument("--real", action="store_true", help="use the default model instead of the scripted engine")
    add_check(parser)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        uvloop.run(print_lags(serve_real(LIMITS) if arguments.real else serve("motet", limits=LIMITS)))
        return 0
    found: dict[str, BatchCost] = {}
    for size in map(BatchSize.of, arguments.sizes.split(",")):
        for stream in (False, True):
            body = size.body(prompt_tokens=arguments.prompt_tokens, max_tokens=arguments.max_tokens, stream=stream)
            costs = []
            for _ in range(arguments.repeats):
                with lag_server("bench.batch", "--serve", *(["--real"] if arguments.real else [])) as server:
                    costs.append(measure(server, body=body))
            found[f"{size}, {'streamed' if stream else 'not streamed'}"] = least_disturbed(costs)
    worst = Target("maximum lag, ms", max(cost.lag_max_ms for cost in found.values()), MAX_LAG_MS)
    shown = table(cost.cells(name) for name, cost in found.items())
    record = {name: asdict(cost) for name, cost in found.items()}
    return print_report(record, shown, conditions=machine(), targets=[worst], check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
