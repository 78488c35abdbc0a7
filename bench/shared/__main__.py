"""Measures requests that share a prompt or a prefix: on Motet, and on other servers.

    group           one request with n choices
    separate        the same n choices as n requests, sent at once
    few-shot        n different questions after one long prefix, sent at once
    different       n prompts that share nothing, sent at once
    conversation    turns of a message and an answer; each answer is generated n times at once, and one of them is kept

All servers get the same prompts in turn: Motet, `--vllm` (vLLM's CPU build with its prefix cache), `--llama`
(llama.cpp's server with a slot for each choice), and `--before`, a running server, for example of an older version. No
prompt is cached when it is sent. Requests have no seeds, and all servers sample at temperature 1 from all tokens. In a
conversation, each server continues with the answer that it generated itself.

Prints a table, and JSON on the last line. "computed" is the number of prompt tokens that were not in a server's cache.

Targets (`--check` fails if one is missed): separate requests reach 0.9 of the tokens per second of one group, and their
last first token comes within 1.2 times the group's time; few-shot requests reach 0.7 of a group's tokens per second,
and 1.5 times vLLM's if vLLM is measured too.

Run: python -m bench.shared [--vllm VENV] [--llama LLAMA_SERVER --llama-model FILE.gguf] [--before URL] [--quick]
    [--ns 32,64] [--cases separate,few-shot] [--repeats 3] [--check]
"""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import TimedLoad, load_parser
from bench.program.command_line import progress
from bench.program.report import Bound, Cells, Target, machine, print_report, table
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server
from bench.servers.llama import LlamaSetup, for_llama
from bench.servers.motet_server import KV_CACHE_GB, motet_server
from bench.servers.peer_server import PeerSetup, all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from bench.shared.cases import CASES, CaseLengths, RoundResult, SendCase, make_case, median_round, run_case
from motet.errors import EngineError
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment

MOTET, BEFORE, VLLM, LLAMA = "motet", "before", "vllm", "llama.cpp"
FULL = CaseLengths(ns=(32, 64), prompt_tokens=1240, question_tokens=40, max_tokens=96, turns=8, forks=16)
QUICK = CaseLengths(ns=(4,), prompt_tokens=240, question_tokens=40, max_tokens=8, turns=2, forks=4)
WARM_UP_TOKENS = 8

CaseKey = tuple[str, str, int]
"""Server, case, n."""


@dataclass(frozen=True)
class SharedRow:
    server: str
    case: str
    n: int
    result: RoundResult
    share: float | None
    """Tokens per second divided by the tokens per second of one group with the same n on the same server. None for a
    conversation, or if no group was measured."""

    def record(self) -> dict[str, object]:
        head = {"server": self.server, "case": self.case, "n": self.n}
        rates = {"tokens_per_s": self.result.tokens_per_s, "decode_tokens_per_s": self.result.decode_tokens_per_s}
        return head | asdict(self.result) | rates | {"share": self.share}

    def cells(self) -> Cells:
        return [
            ("case", self.case, "<"),
            ("n", self.n, ""),
            ("server", self.server, "<"),
            ("last first s", self.result.last_first_s, ".2f"),
            ("total s", self.result.total_s, ".2f"),
            ("tokens/s", self.result.tokens_per_s, ".0f"),
            ("decode tokens/s", self.result.decode_tokens_per_s, ".0f"),
            ("/ group's", self.share, ".2f"),
            ("computed", self.result.computed, ""),
        ]


@dataclass(frozen=True)
class SharedComparison:
    rows: Sequence[SharedRow]
    versions: Mapping[str, str]
    """Version of each server; a question mark if the server does not report it."""


@dataclass
class SharedBench:
    """Sends every case to every server, in turn."""

    servers: Mapping[str, ComparedServer]
    lengths: CaseLengths
    fresh: FreshPrompts

    async def warm_up(self) -> None:
        """Sends short requests, so that the first request of each kind is not timed."""
        short = replace(self.lengths, max_tokens=WARM_UP_TOKENS)
        for case in ("group", "separate"):
            send = make_case(case, short.requests, self.fresh, short)
            for name in self.servers:
                await send(self._load(name, WARM_UP_TOKENS))

    async def measure(self, chosen: Sequence[str], repeats: int) -> list[SharedRow]:
        rounds: dict[CaseKey, list[RoundResult | None]] = {}
        for _ in range(repeats):
            for case, n in kinds(chosen, self.lengths):
                send = make_case(case, n, self.fresh, self.lengths)
                for name in self.servers:
                    rounds.setdefault((name, case, n), []).append(await self._run(name, f"{case}, n = {n}", send))
        return rows_of(rounds)

    async def _run(self, name: str, what: str, send: SendCase) -> RoundResult | None:
        """Returns None if another server than Motet fails, so that the comparison continues."""
        result = None
        try:
            result = await run_case(self.servers[name], self._load(name, self.lengths.max_tokens), send)
        except* (EngineError, httpx.HTTPError, OSError) as errors:
            if name == MOTET:
                raise
            progress(f"{name}: {what} failed: {errors.exceptions!r}")
        if result is not None:
            progress(f"{name}: {what}: {result.total_s:.2f} s")
        return result

    def _load(self, name: str, max_tokens: int) -> TimedLoad:
        load = self.servers[name].load(max_tokens)
        return for_llama(load) if name == LLAMA else load


def kinds(chosen: Sequence[str], lengths: CaseLengths) -> list[tuple[str, int]]:
    """Returns each case with each of its values of n. For a conversation, n is the number of forks."""
    found = [(case, n) for n in lengths.ns for case in CASES if case in chosen and case != "conversation"]
    return [*found, ("conversation", lengths.forks)] if "conversation" in chosen else found


def rows_of(rounds: Mapping[CaseKey, Sequence[RoundResult | None]]) -> list[SharedRow]:
    """Returns a row for each key whose rounds have all succeeded."""
    complete = {
        key: median_round([result for result in results if result]) for key, results in rounds.items() if all(results)
    }
    rows = []
    for (name, case, n), result in sorted(complete.items(), key=lambda item: (item[0][1], item[0][2])):
        group = None if case == "conversation" else complete.get((name, "group", n))
        share = result.tokens_per_s / group.tokens_per_s if group else None
        rows.append(SharedRow(name, case, n, result, share))
    return rows


def targets(rows: Sequence[SharedRow]) -> list[Target]:
    at = {(row.server, row.case, row.n): row for row in rows}
    found: list[Target] = []
    for (name, case, n), row in at.items():
        if name != MOTET:
            continue
        if case == "separate":
            found.append(Target(f"tokens/s of {n} requests / of one group", row.share, 0.9, Bound.AT_LEAST))
            late = ratio(row, at.get((MOTET, "group", n)), lambda result: result.last_first_s)
            found.append(Target(f"last first token of {n} requests / of one group", late, 1.2))
        if case == "few-shot":
            found.append(Target(f"tokens/s of {n} questions / of one group", row.share, 0.7, Bound.AT_LEAST))
            if peer := at.get((VLLM, case, n)):
                faster = ratio(row, peer, lambda result: result.tokens_per_s)
                found.append(Target(f"tokens/s of {n} questions / vLLM's", faster, 1.5, Bound.AT_LEAST))
    return found


def ratio(row: SharedRow, other: SharedRow | None, figure: Callable[[RoundResult], float | None]) -> float | None:
    value, base = figure(row.result), figure(other.result) if other else None
    return value / base if value is not None and base else None


def urls_of(arguments: argparse.Namespace, lengths: CaseLengths, stack: ExitStack) -> dict[str, str]:
    """Returns the URL of each server. Servers that are started here end with `stack`."""
    urls = {MOTET: arguments.url or stack.enter_context(motet_server(arguments.model)).url}
    if arguments.before:
        urls[BEFORE] = arguments.before
    started = {name: stack.enter_context(peer_server(setup)) for name, setup in peers_of(arguments, lengths).items()}
    for name, peer in started.items():
        peer.wait_until_ready()
        urls[name] = peer.url
    return urls


def peers_of(arguments: argparse.Namespace, lengths: CaseLengths) -> dict[str, PeerSetup]:
    """Returns the third-party servers to start, each with capacity for all choices of the largest case."""
    found: dict[str, PeerSetup] = {}
    if arguments.vllm:
        model = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
        flags = ("--enable-prefix-caching", "--max-num-seqs", str(lengths.requests))
        variables = {"VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GB}
        found[VLLM] = VLLMSetup(arguments.vllm, model, all_cores(), flags, variables)
    if arguments.llama:
        found[LLAMA] = LlamaSetup(
            arguments.llama,
            arguments.llama_model,
            slots=lengths.requests,
            context=lengths.context,
            threads=len(all_cores()),
            arguments=shlex.split(arguments.llama_arguments),
        )
    return found


async def measure(urls: Mapping[str, str], lengths: CaseLengths, arguments: argparse.Namespace) -> SharedComparison:
    async with AsyncExitStack() as stack:
        style = RequestStyle(settle_s=arguments.settle)
        servers = {
            name: await stack.enter_async_context(connect_server(name, url, style)) for name, url in urls.items()
        }
        text = await servers[MOTET].load(1).tokens_of(TEXT)
        bench = SharedBench(servers, lengths, FreshPrompts(text, seed=new_seed()))
        await bench.warm_up()
        rows = await bench.measure(arguments.cases, arguments.repeats)
        return SharedComparison(rows, {name: server.version for name, server in servers.items()})


def lengths_of(arguments: argparse.Namespace) -> CaseLengths:
    """Returns the full lengths or the quick ones, with the values that flags replace."""
    base = asdict(QUICK if arguments.quick else FULL)
    return CaseLengths(**{name: getattr(arguments, name) or value for name, value in base.items()})


def names_of_cases(text: str) -> tuple[str, ...]:
    """Parses `separate,few-shot`. A group is always measured."""
    chosen = ("group", *text.split(","))
    if unknown := set(chosen) - set(CASES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return chosen


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.shared", __doc__)
    parser.add_argument("--quick", action="store_true", help="short and few requests, unless other flags are set")
    parser.add_argument("--question-tokens", type=int, help="tokens of a few-shot question and of a user's message")
    parser.add_argument("--turns", type=int, help="number of turns of a conversation")
    parser.add_argument("--forks", type=int, help="number of answers at once in each turn of a conversation")
    parser.add_argument(
        "--cases", type=names_of_cases, default=CASES, help=f"cases in addition to group: {','.join(CASES[1:])}"
    )
    parser.add_argument("--url", help="a running server to use, instead of starting one")
    parser.add_argument("--before", metavar="URL", help="another running server that gets the same requests")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure vLLM too")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="llama.cpp's llama-server, to measure it too")
    parser.add_argument("--llama-model", type=Path, metavar="FILE.gguf", help="the same model for llama-server")
    parser.add_argument(
        "--llama-arguments", default="", help="further flags of llama-server: --llama-arguments=--no-kv-unified"
    )
    parser.add_argument("--settle", type=float, default=0.5, help="pause before and after each case in seconds")
    arguments = parser.parse_args(argv)
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 3
    if (arguments.llama is None) != (arguments.llama_model is None):
        parser.error("--llama and --llama-model belong together")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions, lengths = machine(), lengths_of(arguments)
    with ExitStack() as stack:
        found = asyncio.run(measure(urls_of(arguments, lengths, stack), lengths, arguments))
    line = f"prompt of {lengths.prompt_tokens} tokens, {lengths.max_tokens} tokens per choice; "
    line += f"{lengths.turns} turns of {lengths.question_tokens} and {lengths.max_tokens} tokens"
    record = {"lengths": asdict(lengths), "rows": [row.record() for row in found.rows]}
    conditions |= {f"{name} server": found.versions[name] for name in found.versions}
    shown = (line, table(row.cells() for row in found.rows))
    return print_report(record, *shown, conditions=conditions, targets=targets(found.rows), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
