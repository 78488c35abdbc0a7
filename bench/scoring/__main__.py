"""Measures requests for log-probabilities of given tokens: on Motet, and on other servers.

    few-shot        multiple choice: questions with a long common prefix, each option a prompt with `echo`
    different       prompts of the same number and length without a common prefix
    perplexity      a long text in overlapping windows, each with `prompt_logprobs`; only new tokens are scored
    decisions       questions about one long input, each answered by one of a few tokens

Each server gets the same prompts: Motet, `--vllm` (vLLM's CPU build with its prefix cache), `--llama` (llama.cpp's
server, only for decisions, because it refuses `echo`), and `--before`, a running server, for example of an older
version. No prompt is cached when it is sent. Motet's decisions are one request to /v1/decisions. Other servers get
Motet's prompts one by one, and report the log-probabilities of the options as next tokens (vLLM) or generate one of
them (llama.cpp), both with prefix caches.

Prints a table, and JSON on the last line. "computed" is the number of prompt tokens that were not in a server's prefix
cache, according to its metrics. The log-probabilities of each server are compared with Motet's: "difference" is the
largest difference, "same best" the share of questions with the same most likely option. If vLLM is measured in another
dtype than float32, the servers are started again in float32 for a part of the requests.

Targets (`--check` fails if one is missed): Motet has 10 times vLLM's prompts per second for few-shot questions, 1.2
times for different prompts and 1.5 times for perplexity; in float32, log-probabilities differ by at most 0.001, and all
questions have the same best option.

Run: python -m bench.scoring [--vllm VENV] [--llama LLAMA_SERVER --llama-model FILE.gguf] [--before URL] [--small]
    [--cases few-shot,decisions] [--dtype bfloat16] [--questions 48] [--text 100000] [--repeats 1] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import httpx

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.program.command_line import add_check, benchmark_parser, progress
from bench.program.report import machine, print_report, table
from bench.scoring.cases import (
    CASES,
    CASES_WITHOUT_ECHO,
    ScoringRound,
    ScoringSizes,
    make_requests,
    run_round,
)
from bench.scoring.requests import Dialect, ScoringClient
from bench.scoring.results import BEFORE, FLOAT32, LLAMA, MOTET, VLLM, ScoringRow, rows_of, targets
from bench.servers.compared_server import RequestStyle, connect_server
from bench.servers.llama import LlamaSetup
from bench.servers.motet_server import KV_CACHE_GB, motet_server
from bench.servers.peer_server import PeerSetup, all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from motet.errors import EngineError
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

FULL = ScoringSizes(
    beginning=1200,
    question=25,
    option=12,
    questions=48,
    options=4,
    text=100_000,
    window=2048,
    stride=512,
    input=4000,
    decisions=200,
    concurrency=8,
)
SMALL = replace(FULL, beginning=64, questions=2, options=2, text=200, window=64, stride=32, input=96, decisions=3)
IN_FLOAT32 = {"questions": 4, "text": 8_000, "decisions": 20}
"""Sizes of the requests that are repeated in float32."""
DIALECTS = {MOTET: Dialect.MOTET, BEFORE: Dialect.MOTET, VLLM: Dialect.VLLM, LLAMA: Dialect.LLAMA}


@dataclass(frozen=True)
class ScoringPlan:
    """The requests of a run, and the dtype of the servers."""

    cases: tuple[str, ...]
    sizes: ScoringSizes
    dtype: str
    repeats: int
    settle_s: float


@dataclass(frozen=True)
class ScoringBench:
    """Sends the requests of each case to one server after the other."""

    clients: Mapping[str, ScoringClient]
    fresh: FreshPrompts
    dtype: str

    async def measure(self, cases: tuple[str, ...], sizes: ScoringSizes, repeats: int) -> list[ScoringRow]:
        rounds: dict[tuple[str, str], list[ScoringRound]] = {}
        for case in cases * repeats:
            for name, result in (await self.send(case, sizes)).items():
                rounds.setdefault((name, case), []).append(result)
                progress(f"{name}, {self.dtype}: {case}: {result.total_s:.2f} s")
        return rows_of(rounds, self.dtype)

    async def send(self, case: str, sizes: ScoringSizes) -> dict[str, ScoringRound]:
        """Returns the result of each server. A server other than Motet is missing if it fails."""
        requests = make_requests(case, self.fresh, sizes)
        results = {}
        for name, client in self.clients.items():
            if case not in CASES_WITHOUT_ECHO.get(client.dialect, CASES):
                continue
            if client.dialect is not Dialect.MOTET:
                for request in requests:
                    await request.prepare(self.clients[MOTET])
            try:
                results[name] = await run_round(client, requests)
            except* (EngineError, httpx.HTTPError, OSError) as errors:
                if name == MOTET:
                    raise
                progress(f"{name}: {case} failed: {errors.exceptions!r}")
        return results


async def measure(urls: Mapping[str, str], plan: ScoringPlan) -> tuple[list[ScoringRow], dict[str, str]]:
    """Measures all cases after a short round that is not timed. Returns the rows, and the versions of the servers."""
    async with AsyncExitStack() as stack:
        style = RequestStyle(settle_s=plan.settle_s)
        clients = {}
        for name, url in urls.items():
            server = await stack.enter_async_context(connect_server(name, url, style))
            clients[name] = ScoringClient(server, DIALECTS[name], asyncio.Semaphore(plan.sizes.concurrency))
        text = await clients[MOTET].server.load(1).tokens_of(TEXT)
        bench = ScoringBench(clients, FreshPrompts(text, seed=new_seed()), plan.dtype)
        for case in plan.cases:
            await bench.send(case, SMALL)
        rows = await bench.measure(plan.cases, plan.sizes, plan.repeats)
        return rows, {f"{name} server": client.server.version for name, client in clients.items()}


def urls_of(arguments: argparse.Namespace, plan: ScoringPlan, stack: ExitStack) -> dict[str, str]:
    """Returns the URL of each server. Servers that are started here end with `stack`."""
    started = arguments.url or stack.enter_context(motet_server(arguments.model, "--dtype", plan.dtype)).url
    urls = {MOTET: started}
    if arguments.before:
        urls[BEFORE] = arguments.before
    peers = {name: stack.enter_context(peer_server(setup)) for name, setup in peers_of(arguments, plan).items()}
    for name, peer in peers.items():
        peer.wait_until_ready()
        urls[name] = peer.url
    return urls


def peers_of(arguments: argparse.Namespace, plan: ScoringPlan) -> dict[str, PeerSetup]:
    """Returns the third-party servers to start. llama.cpp is left out in float32: its file determines its dtype."""
    found: dict[str, PeerSetup] = {}
    if arguments.vllm:
        model = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
        # Motet adds the instructions of a decision to the input, which take about 600 tokens.
        flags = ("--enable-prefix-caching", "--dtype", plan.dtype, "--max-model-len", "8192")
        found[VLLM] = VLLMSetup(arguments.vllm, model, all_cores(), flags, {"VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GB})
    if arguments.llama and plan.dtype != FLOAT32:
        slots = plan.sizes.concurrency
        context = slots * (plan.sizes.max_prompt + 1)
        found[LLAMA] = LlamaSetup(arguments.llama, arguments.llama_model, slots, context, threads=len(all_cores()))
    return found


def plans_of(arguments: argparse.Namespace) -> list[ScoringPlan]:
    """Returns the timed run, and a smaller run in float32 if the timed servers have another dtype."""
    base = asdict(SMALL if arguments.small else FULL)
    given = {name: getattr(arguments, name) for name in base if getattr(arguments, name) is not None}
    sizes = ScoringSizes(**base | given)
    timed = ScoringPlan(arguments.cases, sizes, arguments.dtype, arguments.repeats, arguments.settle)
    if arguments.vllm is None or arguments.url is not None or arguments.dtype == FLOAT32:
        return [timed]
    fewer = {name: min(value, base[name]) for name, value in IN_FLOAT32.items()}
    return [timed, replace(timed, sizes=replace(sizes, **fewer), dtype=FLOAT32, repeats=1)]


def names_of_cases(text: str) -> tuple[str, ...]:
    """Parses `few-shot,decisions`."""
    chosen = tuple(text.split(","))
    if unknown := set(chosen) - set(CASES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return chosen


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = benchmark_parser("bench.scoring", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model of the servers that the benchmark starts")
    parser.add_argument("--small", action="store_true", help="short and few requests, unless other flags are set")
    for size in fields(ScoringSizes):
        parser.add_argument(f"--{size.name}", type=int, help=f"by default {getattr(FULL, size.name)}")
    parser.add_argument("--cases", type=names_of_cases, default=CASES, help=f"cases to measure: {','.join(CASES)}")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the servers that are started")
    parser.add_argument("--repeats", type=int, default=1, help="number of measurements of each case")
    parser.add_argument("--url", help="a running server to use, instead of starting one")
    parser.add_argument("--before", metavar="URL", help="another running server that gets the same requests")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure vLLM too")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="llama.cpp's llama-server, to measure it too")
    parser.add_argument("--llama-model", type=Path, metavar="FILE.gguf", help="the same model for llama-server")
    parser.add_argument("--settle", type=float, default=0.5, help="pause before and after each case in seconds")
    add_check(parser)
    arguments = parser.parse_args(argv)
    if (arguments.llama is None) != (arguments.llama_model is None):
        parser.error("--llama and --llama-model belong together")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions, plans = machine(), plans_of(arguments)
    rows: list[ScoringRow] = []
    for plan in plans:
        with ExitStack() as stack:
            found, versions = asyncio.run(measure(urls_of(arguments, plan, stack), plan))
        rows += found
        conditions |= versions
    record = {"sizes": asdict(plans[0].sizes), "rows": [row.record() for row in rows]}
    shown = table(row.cells() for row in rows)
    return print_report(record, shown, conditions=conditions, targets=targets(rows), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
