"""Measures the gain from draft tokens and forced tokens: tokens per second of real answers, with and without them.

Prompts of six kinds (`bench.speculate.tasks`) are answered at several temperatures by Motet with and without draft
tokens. On request, they are also answered by vLLM with and without its n-gram speculation, and by llama.cpp's server
with and without drafts from n-grams. All servers get the same requests in turn, one at a time, and stop at the end of
an answer. Tokens per second are all tokens divided by the time after the first one. Requests to Motet have seeds, and
both of its servers must generate the same text, which is checked for every answer. A grammar constrains tool calls to
the model's own format; only Motet supports this grammar.

Tokens that a grammar forces take no step in either of Motet's servers. `--before` is a running server to compare with,
for example of a version without this.

Targets (`--check` fails if one is missed): all answers of Motet's two servers are equal; with drafts at least 0.9 of
the tokens per second in every case.

Run: python -m bench.speculate [--ns 1,8] [--temperatures 0,0.6,1] [--max-tokens 160] [--vllm VENV]
    [--llama LLAMA_SERVER --llama-model FILE.gguf] [--before URL] [--kinds chat,JSON] [--check]
"""

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from bench.client.load import PATH, load_parser
from bench.client.stream import follow
from bench.program.command_line import progress
from bench.program.report import Bound, Cells, Target, machine, print_report, table
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server
from bench.servers.llama import LlamaSetup
from bench.servers.motet_server import motet_server
from bench.servers.peer_server import PeerSetup, all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from bench.speculate.tasks import PromptTask, long_text, tasks
from motet.cli.conversation import Conversation
from motet.errors import EngineError
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar, GrammarKind

MOTET, PLAIN, BEFORE, VLLM, VLLM_NGRAM, LLAMA, LLAMA_NGRAM = (
    "motet",
    "motet, no drafts",
    "before",
    "vLLM",
    "vLLM, n-grams",
    "llama.cpp",
    "llama.cpp, n-grams",
)
SEEDED = {MOTET, PLAIN, BEFORE}
VLLM_DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
LLAMA_DRAFTS = "--spec-type ngram-mod --spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max 8"
MIN_SPEED = 0.9


@dataclass
class CaseTotals:
    """The answers of one server in one case."""

    tokens: int = 0
    seconds: float = 0.0
    """Time after the first token of each request."""
    texts: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


SpeculateCase = tuple[str, float, int]
"""Kind of prompts, temperature, n."""


@dataclass(frozen=True)
class SpeculateRow:
    case: SpeculateCase
    server: str
    totals: CaseTotals
    speed: float
    """Tokens per second divided by the tokens per second of Motet without drafts."""
    same: bool | None
    """True if all texts equal the texts of Motet without drafts. None for third-party servers, which sample
    differently."""

    def record(self) -> dict[str, object]:
        kind, temperature, n = self.case
        return {
            "kind": kind,
            "temperature": temperature,
            "n": n,
            "server": self.server,
            "tokens": self.totals.tokens,
            "tokens_per_s": self.totals.tokens_per_s,
            "speed": self.speed,
            "same": self.same,
        }

    def cells(self) -> Cells:
        kind, temperature, n = self.case
        return [
            ("kind", kind, "<"),
            ("temperature", temperature, ""),
            ("n", n, ""),
            ("server", self.server, "<"),
            ("tokens", self.totals.tokens, ""),
            ("tokens/s", self.totals.tokens_per_s, ".0f"),
            ("/ without drafts", self.speed, ".2f"),
            ("same", self.same, ""),
        ]


@dataclass(frozen=True)
class SpeculateBench:
    """Sends every case to every server, in turn."""

    servers: Mapping[str, ComparedServer]
    tokenizer: Tokenizer
    prompts: Mapping[str, Sequence[list[int]]]
    """Prompts by kind."""
    grammars: Mapping[str, Grammar | None]
    """Grammars of the answers by kind."""
    max_tokens: int

    async def measure(self, cases: Sequence[SpeculateCase]) -> list[SpeculateRow]:
        for name in self.servers:
            await self._send(name, ("warm-up", 0.0, 1), self.prompts[cases[0][0]][0], seed=0)
        totals: defaultdict[tuple[SpeculateCase, str], CaseTotals] = defaultdict(CaseTotals)
        for case in cases:
            names = [name for name in self.servers if self._supports(name, case[0])]
            if left_out := [name for name in self.servers if name not in names]:
                progress(f"{case}: without {', '.join(left_out)}, which do not support its grammar")
            for number, prompt in enumerate(self.prompts[case[0]]):
                for name in names:
                    try:
                        conversation = await self._send(name, case, prompt, seed=100 * number)
                    except (EngineError, httpx.HTTPError, OSError) as error:
                        if name in SEEDED:
                            raise
                        progress(f"{name}: {case} failed: {error}")
                        continue
                    self._add(totals[case, name], conversation, name)
            speeds = [f"{name} {totals[case, name].tokens_per_s:.0f}" for name in names if (case, name) in totals]
            progress(f"{case}: {', '.join(speeds)} tokens/s")
        return [row_of(case, name, found, totals[case, PLAIN]) for (case, name), found in totals.items()]

    def _supports(self, name: str, kind: str) -> bool:
        grammar = self.grammars[kind]
        return name in SEEDED or grammar is None or grammar.kind is GrammarKind.JSON

    async def _send(self, name: str, case: SpeculateCase, prompt: list[int], *, seed: int) -> Conversation:
        kind, temperature, n = case
        server = self.servers[name]
        body: dict[str, object] = {
            "model": server.model,
            "prompt": prompt,
            "n": 1 if temperature == 0.0 else n,
            "max_tokens": self.max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if name in SEEDED:
            body["seed"] = seed
        if (grammar := self.grammars.get(kind)) is not None:
            body |= grammar_fields(name, grammar)
        conversation = Conversation(1 if temperature == 0.0 else n)
        await asyncio.sleep(server.style.settle_s)
        await follow(server.client, PATH, body, conversation.feed)
        return conversation

    def _add(self, totals: CaseTotals, conversation: Conversation, name: str) -> None:
        if conversation.usage is None or conversation.total_s is None:
            raise EngineError(f"{name} reported no usage")
        texts = [answer.text for answer in conversation.answers]
        if name in {LLAMA, LLAMA_NGRAM}:  # reports the usage of one choice
            totals.tokens += sum(len(self.tokenizer.encode(text)) for text in texts)
        else:
            totals.tokens += conversation.usage.completion_tokens
        totals.seconds += conversation.total_s - (conversation.first_s or 0.0)
        totals.texts += texts


def grammar_fields(name: str, grammar: Grammar) -> dict[str, object]:
    """Returns the request fields that constrain the answers of a server to a grammar."""
    if grammar.kind is GrammarKind.LARK:
        return {"structured_outputs": {"grammar": grammar.source}}
    schema = json.loads(grammar.source)
    return {"json_schema": schema} if name in {LLAMA, LLAMA_NGRAM} else {"structured_outputs": {"json": schema}}


def row_of(case: SpeculateCase, name: str, totals: CaseTotals, plain: CaseTotals) -> SpeculateRow:
    same = totals.texts == plain.texts if name in {MOTET, PLAIN} else None
    return SpeculateRow(case, name, totals, totals.tokens_per_s / plain.tokens_per_s, same)


def targets(rows: Sequence[SpeculateRow]) -> list[Target]:
    motet = [row for row in rows if row.server == MOTET]
    slowest = min(motet, key=lambda row: row.speed)
    return [
        Target("cases with different answers", float(sum(row.same is not True for row in motet)), 0.0),
        Target(f"lowest tokens/s / without drafts ({slowest.case})", slowest.speed, MIN_SPEED, Bound.AT_LEAST),
    ]


def peers_of(arguments: argparse.Namespace, folder: Path) -> dict[str, PeerSetup]:
    found: dict[str, PeerSetup] = {}
    if arguments.vllm:
        vllm = VLLMSetup(arguments.vllm, folder, all_cores(), ("--enable-prefix-caching",))
        found[VLLM] = vllm
        found[VLLM_NGRAM] = replace(vllm, arguments=(*vllm.arguments, "--speculative-config", VLLM_DRAFTS))
    if arguments.llama:
        slots = max(arguments.ns)
        llama = LlamaSetup(
            arguments.llama, arguments.llama_model, slots=slots, context=2048 * slots, threads=len(all_cores())
        )
        found[LLAMA] = llama
        found[LLAMA_NGRAM] = replace(llama, arguments=LLAMA_DRAFTS.split())
    return found


async def measure(
    urls: Mapping[str, str], chosen: Sequence[PromptTask], tokenizer: Tokenizer, arguments: argparse.Namespace
) -> list[SpeculateRow]:
    async with AsyncExitStack() as stack:
        style = RequestStyle(settle_s=0.2)
        servers = {
            name: await stack.enter_async_context(connect_server(name, url, style)) for name, url in urls.items()
        }
        bench = SpeculateBench(
            servers,
            tokenizer,
            prompts={task.name: task.prompts(tokenizer) for task in chosen},
            grammars={task.name: task.grammar for task in chosen},
            max_tokens=arguments.max_tokens,
        )
        temperatures = [float(text) for text in arguments.temperatures.split(",")]
        return await bench.measure(
            [
                (task.name, temperature, n)
                for task in chosen
                for temperature in temperatures
                for n in (arguments.ns if temperature else (1,))
            ]
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.speculate", __doc__, ns=(1, 8), max_tokens=160)
    parser.add_argument("--temperatures", default="0,0.6,1", help="temperatures, e.g. 0,0.6,1")
    parser.add_argument("--kinds", help="kinds of prompts, e.g. chat,JSON (default: all)")
    parser.add_argument("--before", metavar="URL", help="another running server that gets the same requests")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure vLLM too")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="llama.cpp's llama-server, to measure it too")
    parser.add_argument("--llama-model", type=Path, metavar="FILE.gguf", help="the same model for llama-server")
    arguments = parser.parse_args(argv)
    if (arguments.llama is None) != (arguments.llama_model is None):
        parser.error("--llama and --llama-model belong together")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions = machine()
    folder = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
    kinds = arguments.kinds.split(",") if arguments.kinds else None
    tokenizer = Tokenizer.load(folder)
    known = tasks(long_text(Path(__file__).parents[2]), tokenizer)
    chosen = [task for task in known if kinds is None or task.name in kinds]
    with ExitStack() as stack:
        urls = {
            MOTET: stack.enter_context(motet_server(arguments.model)).url,
            PLAIN: stack.enter_context(motet_server(arguments.model, "--draft-tokens", "0")).url,
            **({BEFORE: arguments.before} if arguments.before else {}),
        }
        for name, setup in peers_of(arguments, folder).items():
            peer = stack.enter_context(peer_server(setup))
            peer.wait_until_ready()
            urls[name] = peer.url
        rows = asyncio.run(measure(urls, chosen, tokenizer, arguments))
    return print_report(
        {"rows": [row.record() for row in rows]},
        table(row.cells() for row in rows),
        conditions=conditions,
        targets=targets(rows),
        check=arguments.check,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
