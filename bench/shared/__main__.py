"""Measures requests that share a prompt, or its beginning, and come apart: Motet, and other servers beside it.

    group           one request with n choices
    separate        the same n choices as n requests, sent at once
    few-shot        n different questions behind one long beginning, sent at once
    different       n prompts that share nothing, sent at once
    conversation    turns of a message and an answer; each answer is written n times at once, and one of them is kept

All servers get the same prompts by turns: ours, `--vllm` (vLLM's CPU build with its prefix cache), `--llama`
(llama.cpp's server with a slot for each choice), and `--before`, a running server, for instance of an older version. No
cache has a prompt when it is sent. Nobody gets a seed, and all draw at temperature 1 from all tokens. In a conversation
each server goes on with the answer that it has written itself.

Prints a table, and JSON on the last line. "computed" are the prompt tokens that a server says it has computed.

Floors (`--check` fails when one is missed): separate requests have 0.9 of the tokens per second of one group, and their
last first token within 1.2 times its time; few-shot requests have 0.7 of a group's, and 1.5 times vLLM's if that is
measured too.

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

from bench.client.load import Load
from bench.client.prompts import TEXT, FreshPrompts, new_seed
from bench.program.command_line import load_parser, progress
from bench.program.report import Bound, Floor, Table, columns_table, machine, tell
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server
from bench.servers.llama import LlamaSetup, for_llama
from bench.servers.motet_server import KV_CACHE_GB, motet_server
from bench.servers.peer import PeerSetup, all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from bench.shared.cases import CASES, Case, Lengths, Taken, make_case, take, typical
from motet.errors import EngineError
from motet.models.model_source import resolve
from motet.settings.server_config import cache_folder, environment

OURS, BEFORE, VLLM, LLAMA = "motet", "before", "vllm", "llama.cpp"
WHOLE = Lengths(ns=(32, 64), prompt_tokens=1240, question_tokens=40, max_tokens=96, turns=8, forks=16)
QUICK = Lengths(ns=(4,), prompt_tokens=240, question_tokens=40, max_tokens=8, turns=2, forks=4)
WARM_UP_TOKENS = 8

Place = tuple[str, str, int]
"""Server, case, n."""


@dataclass(frozen=True)
class Row:
    server: str
    case: str
    n: int
    taken: Taken
    share: float | None
    """Tokens per second, as a share of those of one group with as many choices there; None for a conversation, or if no
    group was measured."""

    def record(self) -> dict[str, object]:
        head = {"server": self.server, "case": self.case, "n": self.n}
        return head | asdict(self.taken) | {"tokens_per_s": self.taken.tokens_per_s, "share": self.share}


@dataclass(frozen=True)
class Comparison:
    rows: Sequence[Row]
    versions: Mapping[str, str]
    """Of each server; a question mark for one that does not tell."""


@dataclass
class SharedBench:
    """Asks every server for every case by turns."""

    servers: Mapping[str, ComparedServer]
    lengths: Lengths
    fresh: FreshPrompts

    async def warm_up(self) -> None:
        """Sends short requests, so that no first request of its kind is timed."""
        short = replace(self.lengths, max_tokens=WARM_UP_TOKENS)
        for case in ("group", "separate"):
            prompts = make_case(case, short.requests, self.fresh, short)
            for name in self.servers:
                await prompts(self._load(name, WARM_UP_TOKENS))

    async def measure(self, chosen: Sequence[str], repeats: int) -> list[Row]:
        rounds: dict[Place, list[Taken | None]] = {}
        for _ in range(repeats):
            for case, n in kinds(chosen, self.lengths):
                asked = make_case(case, n, self.fresh, self.lengths)
                for name in self.servers:
                    rounds.setdefault((name, case, n), []).append(await self._take(name, f"{case}, n = {n}", asked))
        return rows_of(rounds)

    async def _take(self, name: str, what: str, case: Case) -> Taken | None:
        """Returns None if another server than ours fails, so that the comparison goes on."""
        taken = None
        try:
            taken = await take(self.servers[name], self._load(name, self.lengths.max_tokens), case)
        except* (EngineError, httpx.HTTPError, OSError) as errors:
            if name == OURS:
                raise
            progress(f"{name}: {what} failed: {errors.exceptions!r}")
        if taken is not None:
            progress(f"{name}: {what}: {taken.total_s:.2f} s")
        return taken

    def _load(self, name: str, max_tokens: int) -> Load:
        load = self.servers[name].load(max_tokens)
        return for_llama(load) if name == LLAMA else load


def kinds(chosen: Sequence[str], lengths: Lengths) -> list[tuple[str, int]]:
    """Returns each case with each of its n. A conversation has an n of its own."""
    found = [(case, n) for n in lengths.ns for case in CASES if case in chosen and case != "conversation"]
    return [*found, ("conversation", lengths.forks)] if "conversation" in chosen else found


def rows_of(rounds: Mapping[Place, Sequence[Taken | None]]) -> list[Row]:
    """Returns a row for each place; none where a round has failed."""
    whole = {place: typical([one for one in taken if one]) for place, taken in rounds.items() if all(taken)}
    rows = []
    for (name, case, n), taken in sorted(whole.items(), key=lambda item: (item[0][1], item[0][2])):
        group = None if case == "conversation" else whole.get((name, "group", n))
        rows.append(Row(name, case, n, taken, taken.tokens_per_s / group.tokens_per_s if group else None))
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    heads = [("case", "<"), ("n", ""), ("server", "<"), ("last first s", ".2f"), ("total s", ".2f")]
    heads += [("tokens/s", ".0f"), ("of a group's", ".2f"), ("computed", "")]
    return columns_table(heads, map(cells_of, rows))


def cells_of(row: Row) -> Sequence[object]:
    taken = row.taken
    times = (taken.last_first_s, taken.total_s, taken.tokens_per_s)
    return (row.case, row.n, row.server, *times, row.share, taken.computed)


def floors(rows: Sequence[Row]) -> list[Floor]:
    at = {(row.server, row.case, row.n): row for row in rows}
    found: list[Floor] = []
    for (name, case, n), row in at.items():
        if name != OURS:
            continue
        if case == "separate":
            found.append(Floor(f"tokens/s, {n} requests to one group", row.share, 0.9, Bound.AT_LEAST))
            late = ratio(row, at.get((OURS, "group", n)), lambda taken: taken.last_first_s)
            found.append(Floor(f"last first token, {n} requests to one group", late, 1.2))
        if case == "few-shot":
            found.append(Floor(f"tokens/s, {n} questions to one group", row.share, 0.7, Bound.AT_LEAST))
            if peer := at.get((VLLM, case, n)):
                faster = ratio(row, peer, lambda taken: taken.tokens_per_s)
                found.append(Floor(f"tokens/s, {n} questions to vLLM's", faster, 1.5, Bound.AT_LEAST))
    return found


def ratio(row: Row, other: Row | None, figure: Callable[[Taken], float | None]) -> float | None:
    value, base = figure(row.taken), figure(other.taken) if other else None
    return value / base if value is not None and base else None


def urls_of(arguments: argparse.Namespace, lengths: Lengths, stack: ExitStack) -> dict[str, str]:
    """Returns the URL of each server. Those that are started here end with `stack`."""
    urls = {OURS: arguments.url or stack.enter_context(motet_server(arguments.model)).url}
    if arguments.before:
        urls[BEFORE] = arguments.before
    started = {name: stack.enter_context(peer_server(setup)) for name, setup in peers_of(arguments, lengths).items()}
    for name, peer in started.items():
        peer.wait_until_ready()
        urls[name] = peer.url
    return urls


def peers_of(arguments: argparse.Namespace, lengths: Lengths) -> dict[str, PeerSetup]:
    """Returns the other servers to start, each with room for all choices of the largest case."""
    found: dict[str, PeerSetup] = {}
    if arguments.vllm:
        model = resolve(arguments.model, cache=cache_folder(environment()), say=progress)
        own = ("--enable-prefix-caching", "--max-num-seqs", str(lengths.requests))
        room = {"VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GB}
        found[VLLM] = VLLMSetup(arguments.vllm, model, all_cores(), own, room)
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


async def measure(urls: Mapping[str, str], lengths: Lengths, arguments: argparse.Namespace) -> Comparison:
    async with AsyncExitStack() as stack:
        manner = RequestStyle(settle_s=arguments.settle)
        servers = {
            name: await stack.enter_async_context(connect_server(name, url, manner)) for name, url in urls.items()
        }
        text = await servers[OURS].load(1).tokens_of(TEXT)
        bench = SharedBench(servers, lengths, FreshPrompts(text, seed=new_seed()))
        await bench.warm_up()
        rows = await bench.measure(arguments.cases, arguments.repeats)
        return Comparison(rows, {name: server.version for name, server in servers.items()})


def lengths_of(arguments: argparse.Namespace) -> Lengths:
    """Returns the whole lengths, or the quick ones, with the values that flags replace."""
    base = asdict(QUICK if arguments.quick else WHOLE)
    return Lengths(**{name: getattr(arguments, name) or value for name, value in base.items()})


def names_of_cases(text: str) -> tuple[str, ...]:
    """Reads `separate,few-shot`; a group is always measured."""
    chosen = ("group", *text.split(","))
    if unknown := set(chosen) - set(CASES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return chosen


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.shared", __doc__)
    parser.add_argument("--quick", action="store_true", help="short and few requests, unless flags say more")
    parser.add_argument("--question-tokens", type=int, help="tokens of a few-shot question and of a user's message")
    parser.add_argument("--turns", type=int, help="turns of a conversation")
    parser.add_argument("--forks", type=int, help="answers that are written at once at each turn of a conversation")
    parser.add_argument("--cases", type=names_of_cases, default=CASES, help=f"beside group: {','.join(CASES[1:])}")
    parser.add_argument("--url", help="a running server, in place of one started here")
    parser.add_argument("--before", metavar="URL", help="another running server that gets the same requests")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure it too")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="llama.cpp's llama-server, to measure it too")
    parser.add_argument("--llama-model", type=Path, metavar="FILE.gguf", help="the same model for it")
    parser.add_argument("--llama-arguments", default="", help="more of its flags: --llama-arguments=--no-kv-unified")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds of quiet before and after each case")
    arguments = parser.parse_args(argv)
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 3
    if (arguments.llama is None) != (arguments.llama_model is None):
        parser.error("--llama and --llama-model belong together")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about, lengths = machine(), lengths_of(arguments)
    with ExitStack() as stack:
        found = asyncio.run(measure(urls_of(arguments, lengths, stack), lengths, arguments))
    shown = f"prompt {lengths.prompt_tokens} tokens, {lengths.max_tokens} tokens a choice; "
    shown += f"{lengths.turns} turns of {lengths.question_tokens} and {lengths.max_tokens} tokens"
    record = {"lengths": asdict(lengths), "rows": [row.record() for row in found.rows]}
    about |= {f"{name} server": found.versions[name] for name in found.versions}
    return tell(record, shown, table_of(found.rows), about=about, floors=floors(found.rows), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
