"""Measures what draft tokens and forced tokens bring: tokens a second of real answers, with them and without.

Prompts of six kinds (`bench.speculate.tasks`) are answered at some temperatures by Motet with draft tokens, by Motet
without, and, if asked for, by vLLM and by vLLM with its n-gram speculation, and by llama.cpp's server, also with drafts
from n-grams. All get the same requests by turns, one at a time, and stop where an answer ends. Tokens a second are all
tokens over the time after the first one. Ours get seeds, and the two must write the same text: that is checked for
every answer. Calls of tools are held to a grammar in the model's own way of writing them, which only ours take.

Tokens that a grammar forces take no step of their own in either of ours; `--before` is a running server to compare
with, for instance of a version without that.

Floors (`--check` fails when one is missed): all answers of ours are equal; with drafts at least 0.9 of the tokens a
second in every case.

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

from bench.client.load import PATH
from bench.client.stream import follow
from bench.program.command_line import load_parser, progress
from bench.program.report import Bound, Floor, Table, columns_table, machine, tell
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server
from bench.servers.llama import LlamaSetup
from bench.servers.motet_server import motet_server
from bench.servers.peer import PeerSetup, all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from bench.speculate.tasks import Task, long_text, tasks
from motet.cli.conversation import Conversation
from motet.errors import EngineError
from motet.models.model_source import resolve
from motet.settings.server_config import cache_folder, environment
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar, GrammarKind

OURS, PLAIN, BEFORE, VLLM, VLLM_NGRAM, LLAMA, LLAMA_NGRAM = (
    "motet",
    "motet, no drafts",
    "before",
    "vLLM",
    "vLLM, n-grams",
    "llama.cpp",
    "llama.cpp, n-grams",
)
SEEDED = {OURS, PLAIN, BEFORE}
VLLM_DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
LLAMA_DRAFTS = "--spec-type ngram-mod --spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max 8"
LEAST_SPEED = 0.9


@dataclass
class Taken:
    """What a server wrote in one case."""

    tokens: int = 0
    seconds: float = 0.0
    """After the first token of each request."""
    texts: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


Case = tuple[str, float, int]
"""Kind of prompts, temperature, n."""


@dataclass(frozen=True)
class Row:
    case: Case
    server: str
    taken: Taken
    speed: float
    """Tokens per second, in terms of ours without drafts."""
    same: bool | None
    """True if all texts are those of ours without drafts; None for others, which draw otherwise."""

    def record(self) -> dict[str, object]:
        kind, temperature, n = self.case
        taken = {"tokens": self.taken.tokens, "tokens_per_s": self.taken.tokens_per_s}
        return (
            {"kind": kind, "temperature": temperature, "n": n, "server": self.server}
            | taken
            | {
                "speed": self.speed,
                "same": self.same,
            }
        )


@dataclass(frozen=True)
class SpeculateBench:
    """Asks every server for every case by turns."""

    servers: Mapping[str, ComparedServer]
    tokenizer: Tokenizer
    prompts: Mapping[str, Sequence[list[int]]]
    """Of each kind."""
    grammars: Mapping[str, Grammar | None]
    """Of the answers of each kind."""
    max_tokens: int

    async def measure(self, cases: Sequence[Case]) -> list[Row]:
        for name in self.servers:
            await self._ask(name, ("warm-up", 0.0, 1), self.prompts[cases[0][0]][0], seed=0)
        taken: defaultdict[tuple[Case, str], Taken] = defaultdict(Taken)
        for case in cases:
            asked = [name for name in self.servers if self._takes(name, case[0])]
            if left_out := [name for name in self.servers if name not in asked]:
                progress(f"{case}: left out, since they do not take its grammar: {', '.join(left_out)}")
            for number, prompt in enumerate(self.prompts[case[0]]):
                for name in asked:
                    try:
                        talk = await self._ask(name, case, prompt, seed=100 * number)
                    except (EngineError, httpx.HTTPError, OSError) as error:
                        if name in SEEDED:
                            raise
                        progress(f"{name}: {case} failed: {error}")
                        continue
                    self._note(taken[case, name], talk, name)
            told = (f"{name} {taken[case, name].tokens_per_s:.0f}" for name in self.servers if (case, name) in taken)
            progress(f"{case}: {', '.join(told)} tokens/s")
        return [row_of(case, name, one, taken[case, PLAIN]) for (case, name), one in taken.items()]

    def _takes(self, name: str, kind: str) -> bool:
        grammar = self.grammars[kind]
        return name in SEEDED or grammar is None or grammar.kind is GrammarKind.JSON

    async def _ask(self, name: str, case: Case, prompt: list[int], *, seed: int) -> Conversation:
        kind, temperature, n = case
        contender = self.servers[name]
        body: dict[str, object] = {
            "model": contender.model,
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
            body |= form_for(name, grammar)
        talk = Conversation(1 if temperature == 0.0 else n)
        await asyncio.sleep(contender.style.settle_s)
        await follow(contender.client, PATH, body, talk.feed)
        return talk

    def _note(self, taken: Taken, talk: Conversation, name: str) -> None:
        if talk.usage is None or talk.total_s is None:
            raise EngineError(f"{name} told no usage")
        texts = [answer.text for answer in talk.answers]
        if name in {LLAMA, LLAMA_NGRAM}:  # its usage is that of one choice
            taken.tokens += sum(len(self.tokenizer.encode(text)) for text in texts)
        else:
            taken.tokens += talk.usage.completion_tokens
        taken.seconds += talk.total_s - (talk.first_s or 0.0)
        taken.texts += texts


def form_for(name: str, grammar: Grammar) -> dict[str, object]:
    """Returns the fields that hold the answers of a server to a grammar."""
    if grammar.kind is GrammarKind.LARK:
        return {"structured_outputs": {"grammar": grammar.source}}
    schema = json.loads(grammar.source)
    return {"json_schema": schema} if name in {LLAMA, LLAMA_NGRAM} else {"structured_outputs": {"json": schema}}


def row_of(case: Case, name: str, taken: Taken, plain: Taken) -> Row:
    same = taken.texts == plain.texts if name in {OURS, PLAIN} else None
    return Row(case, name, taken, taken.tokens_per_s / plain.tokens_per_s, same)


def table_of(rows: Sequence[Row]) -> Table:
    heads = [("kind", "<"), ("temperature", ""), ("n", ""), ("server", "<"), ("tokens", ""), ("tokens/s", ".0f")]
    heads += [("of no drafts", ".2f"), ("same", "")]
    return columns_table(heads, ([*row.record().values()] for row in rows))


def floors(rows: Sequence[Row]) -> list[Floor]:
    ours = [row for row in rows if row.server == OURS]
    slowest = min(ours, key=lambda row: row.speed)
    return [
        Floor("cases whose answers differ", float(sum(row.same is not True for row in ours)), 0.0),
        Floor(f"least tokens/s, of no drafts ({slowest.case})", slowest.speed, LEAST_SPEED, Bound.AT_LEAST),
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
    urls: Mapping[str, str], chosen: Sequence[Task], tokenizer: Tokenizer, arguments: argparse.Namespace
) -> list[Row]:
    async with AsyncExitStack() as stack:
        manner = RequestStyle(settle_s=0.2)
        servers = {
            name: await stack.enter_async_context(connect_server(name, url, manner)) for name, url in urls.items()
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
    parser.add_argument("--temperatures", default="0,0.6,1", help="e.g. 0,0.6,1")
    parser.add_argument("--kinds", help="kinds of prompts, e.g. chat,JSON; all if left out")
    parser.add_argument("--before", metavar="URL", help="another running server that gets the same requests")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure it too")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="llama.cpp's llama-server, to measure it too")
    parser.add_argument("--llama-model", type=Path, metavar="FILE.gguf", help="the same model for it")
    arguments = parser.parse_args(argv)
    if (arguments.llama is None) != (arguments.llama_model is None):
        parser.error("--llama and --llama-model belong together")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about = machine()
    folder = resolve(arguments.model, cache=cache_folder(environment()), say=progress)
    kinds = arguments.kinds.split(",") if arguments.kinds else None
    tokenizer = Tokenizer.load(folder)
    known = tasks(long_text(Path(__file__).parents[2]), tokenizer)
    chosen = [task for task in known if kinds is None or task.name in kinds]
    with ExitStack() as stack:
        urls = {
            OURS: stack.enter_context(motet_server(arguments.model)).url,
            PLAIN: stack.enter_context(motet_server(arguments.model, "--draft-tokens", "0")).url,
            **({BEFORE: arguments.before} if arguments.before else {}),
        }
        for name, setup in peers_of(arguments, folder).items():
            peer = stack.enter_context(peer_server(setup))
            peer.wait_until_ready()
            urls[name] = peer.url
        rows = asyncio.run(measure(urls, chosen, tokenizer, arguments))
    return tell(
        {"rows": [row.record() for row in rows]},
        table_of(rows),
        about=about,
        floors=floors(rows),
        check=arguments.check,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
