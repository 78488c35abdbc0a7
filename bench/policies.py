"""Measures what a group policy costs and what it saves.

1. A policy that never fires: tokens a second of 32 choices with it, in terms of those without, by turns.
2. From the decision to freed rows: how many tokens the engine has written for each choice that a decision ended, beyond
   those that the answer has. One is the token of the step that was under way.
3. Sums with a majority vote by Adaptive-Consistency's rule (posterior 0.95): all 40 answers, the group with a policy,
   and a client that runs the same rule over requests with n = 1, several at a time, and leaves the rest when it has
   enough. Seeds are the same, so are the answers; the tokens are those that the engine has written.

Floors (`--check` fails when one is missed): a policy that never fires leaves 0.99 of the tokens a second; a decision
costs at most two tokens a choice; a group writes no more tokens than the client's loop, and is done sooner.

Run: python -m bench.policies [--ns 32] [--repeats 9] [--check]
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import mean, median

import httpx
import msgspec

from bench.client.load import Load, LoadSetup, open_client
from bench.client.prompts import TEXT, FreshPrompts, new_seed
from bench.program.command_line import load_parser, progress
from bench.program.report import Bound, Floor, Table, columns_table, machine, tell
from bench.servers.motet_server import counters, motet_server
from examples.self_consistency.questions import make_questions
from motet.deploy.child import CounterSnapshot
from motet.policies.criteria import Answers, Posterior
from motet.policies.extract import Extract, ExtractKind

SILENT: dict[str, dict[str, object]] = {
    "none": {},
    "agree": {"stop_when": {"agree": 32}, "extract": {"regex": "answer is (\\d+)"}},
    "vote, deterministic": {"vote": True, "extract": "last_number", "deterministic": True},
    "confidence": {"confidence": {"window": 16, "below": -1.0, "top": 5}},
}
"""Policies that never end a choice. The last one takes log-probabilities, and so more work in the engine."""
PLAIN = "none"
FREE = ("agree", "vote, deterministic")
"""Those that must cost nothing."""
SAMPLES = 40
AT_A_TIME = 4
POSTERIOR = 0.95
SUM_TOKENS = 64
QUESTIONS = 12
ENDS = list(range(0, 49_000, 60))
"""Tokens at which choices end: about every 60 tokens one of them is drawn."""


@dataclass(frozen=True)
class Overhead:
    policy: str
    tokens_per_s: float
    share: float
    """Of the tokens per second without a policy; the median of the ratios of neighbours in time."""


@dataclass(frozen=True)
class Vote:
    """What all questions took in one way."""

    way: str
    tokens: int
    """Tokens that the engine has written."""
    seconds: float
    samples: float
    """Mean number of answers that have begun."""
    same: float
    """Share of the questions whose majority is that of all answers."""


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Report(msgspec.Struct):
    begun: int
    aborted: int
    vote: dict[str, object] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    groups: list[_Report] = []


async def overheads(client: httpx.AsyncClient, setup: LoadSetup) -> list[Overhead]:
    n = setup.ns[0]
    plain = Load(client, setup.max_tokens, count_blocks=False)
    fresh = FreshPrompts(await plain.tokens_of(TEXT), seed=new_seed())
    speeds: dict[str, list[float]] = {name: [] for name in SILENT}
    await plain.group(fresh.next(setup.prompt_tokens), n, seed=0)  # warm-up
    for repeat in range(setup.repeats):
        names = list(SILENT)
        for name in names if repeat % 2 else reversed(names):
            load = replace(plain, prepare=adding(SILENT[name])) if SILENT[name] else plain
            timing = await load.group(fresh.next(setup.prompt_tokens), n, seed=repeat)
            speeds[name].append(timing.decode_tokens_per_s)
        progress(", ".join(f"{name} {taken[-1]:.0f}" for name, taken in speeds.items()) + " tokens/s")
    return [
        Overhead(
            name,
            median(taken),
            median(with_it / without for with_it, without in zip(taken, speeds[PLAIN], strict=True)),
        )
        for name, taken in speeds.items()
    ]


class adding:
    """Adds a policy to the body of a request."""

    def __init__(self, group: Mapping[str, object]) -> None:
        self._group = group

    async def __call__(self, body: dict[str, object]) -> dict[str, object]:
        return body | {"group": self._group}


async def tokens_beyond(client: httpx.AsyncClient, setup: LoadSetup) -> float:
    """Returns the mean number of tokens that a choice has written beyond the decision that ended it."""
    prompt = await Load(client, 1).tokens_of(TEXT[: 4 * setup.prompt_tokens])
    beyond = []
    for repeat in range(setup.repeats):
        body = {
            "prompt": prompt,
            "n": setup.ns[0],
            "seed": 1000 * repeat,
            "max_tokens": 400,
            "stop_token_ids": ENDS,
            "group": {"stop_when": {"finished": 2}},
        }
        before = await counters(client)
        answer = await complete(client, body)
        spent = (await counters(client)) - before
        (report,) = answer.groups
        beyond.append((spent.generation_tokens - answer.usage.completion_tokens) / report.aborted)
    return mean(beyond)


async def complete(client: httpx.AsyncClient, body: Mapping[str, object]) -> _Answer:
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=_Answer)


@dataclass(frozen=True)
class Votes:
    """Asks all questions in one way."""

    client: httpx.AsyncClient
    prompts: Sequence[str]

    def body(self, prompt: str, n: int, *, seed: int) -> dict[str, object]:
        sampling = {"temperature": 0.6, "max_tokens": SUM_TOKENS, "stop": ["\n\n"]}
        return {"prompt": prompt, "n": n, "seed": seed} | sampling

    async def all_of_them(self) -> tuple[Vote, list[str | None]]:
        return await self._groups("all answers", {"vote": True, "extract": "last_number"}, [])

    async def with_policy(self, majorities: Sequence[str | None]) -> Vote:
        group = {"stop_when": {"posterior": POSTERIOR}, "extract": "last_number", "vote": True, "start": AT_A_TIME}
        vote, _ = await self._groups("a group with a policy", group, majorities)
        return vote

    async def _groups(
        self, way: str, group: Mapping[str, object], majorities: Sequence[str | None]
    ) -> tuple[Vote, list[str | None]]:
        before, started = await counters(self.client), time.monotonic()
        found, begun = list[str | None](), 0
        for number, prompt in enumerate(self.prompts):
            answer = await complete(self.client, self.body(prompt, SAMPLES, seed=1000 * number) | {"group": group})
            (report,) = answer.groups
            begun += report.begun
            value = (report.vote or {}).get("majority")
            found.append(value if isinstance(value, str) else None)
        return await self._vote(
            way, before, started=started, begun=begun, found=found, majorities=majorities or found
        ), found

    async def by_client(self, majorities: Sequence[str | None]) -> Vote:
        before, started = await counters(self.client), time.monotonic()
        found, begun = list[str | None](), 0
        for number, prompt in enumerate(self.prompts):
            loop = ClientLoop(self, prompt, first_seed=1000 * number)
            found.append(await loop.run())
            begun += loop.begun
        return await self._vote(
            "a client's loop", before, started=started, begun=begun, found=found, majorities=majorities
        )

    async def _vote(
        self,
        way: str,
        before: CounterSnapshot,
        started: float,
        *,
        begun: int,
        found: Sequence[str | None],
        majorities: Sequence[str | None],
    ) -> Vote:
        seconds = time.monotonic() - started
        spent = (await counters(self.client)) - before
        same = mean(mine == others for mine, others in zip(found, majorities, strict=True))
        vote = Vote(way, spent.generation_tokens, seconds, begun / len(self.prompts), same)
        progress(f"{way}: {vote.tokens} tokens, {seconds:.1f} s")
        return vote


class ClientLoop:
    """Adaptive-Consistency as clients write it: requests with n = 1, some at a time, until the rule is met."""

    def __init__(self, votes: Votes, prompt: str, *, first_seed: int) -> None:
        self.begun = 0
        self._votes = votes
        self._prompt = prompt
        self._first_seed = first_seed
        self._answers = Answers(SAMPLES)
        self._extract = Extract(ExtractKind.LAST_NUMBER)
        self._rule = Posterior(POSTERIOR)

    async def run(self) -> str | None:
        """Returns the majority, once the rule is met or no answer is left."""
        asked: set[asyncio.Task[tuple[int, str]]] = set()
        met = False
        while not met and (self.begun < SAMPLES or asked):
            while self.begun < SAMPLES and len(asked) < AT_A_TIME:
                asked.add(asyncio.create_task(self._ask(self.begun)))
                self.begun += 1
            done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, text = task.result()
                self._answers.finish(index, self._extract.value(text))
            met = self._rule.met(self._answers) is not None
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        majority = self._answers.majority()
        return None if majority is None else majority.value

    async def _ask(self, index: int) -> tuple[int, str]:
        body = self._votes.body(self._prompt, 1, seed=self._first_seed + index)
        (choice,) = (await complete(self._votes.client, body)).choices
        return index, choice.text


async def measure(url: str, setup: LoadSetup) -> tuple[list[Overhead], float, list[Vote]]:
    async with open_client(url) as client:
        rows = await overheads(client, setup)
        beyond = await tokens_beyond(client, setup)
        votes = Votes(client, [question.prompt for question in make_questions(QUESTIONS, seed=1)])
        whole, majorities = await votes.all_of_them()
        return rows, beyond, [whole, await votes.with_policy(majorities), await votes.by_client(majorities)]


def tables(rows: Sequence[Overhead], votes: Sequence[Vote]) -> list[Table]:
    heads = [("policy that never fires", "<"), ("tokens/s", ".0f"), ("of none", ".3f")]
    ways = [("sums, posterior 0.95", "<"), ("tokens", ""), ("seconds", ".1f"), ("answers", ".1f"), ("same", ".2f")]
    return [
        columns_table(heads, [(row.policy, row.tokens_per_s, row.share) for row in rows]),
        columns_table(ways, [(vote.way, vote.tokens, vote.seconds, vote.samples, vote.same) for vote in votes]),
    ]


def floors(rows: Sequence[Overhead], beyond: float, votes: Sequence[Vote]) -> list[Floor]:
    _, group, loop = votes
    return [
        *(
            Floor(f"tokens/s with {row.policy}, of none", row.share, 0.99, Bound.AT_LEAST)
            for row in rows
            if row.policy in FREE
        ),
        Floor("tokens a choice beyond the decision", beyond, 2.0),
        Floor("tokens of a group, of a client's loop", group.tokens / loop.tokens, 1.0),
        Floor("seconds of a group, of a client's loop", group.seconds / loop.seconds, 1.0),
    ]


def main(argv: Sequence[str]) -> int:
    arguments: argparse.Namespace = load_parser(
        "bench.policies", __doc__, ns=(32,), prompt_tokens=400, max_tokens=128, repeats=9
    ).parse_args(argv)
    about = machine()
    with ExitStack() as stack:
        url = stack.enter_context(motet_server(arguments.model)).url
        rows, beyond, votes = asyncio.run(measure(url, LoadSetup.of(arguments)))
    record = {
        "overhead": [asdict(row) for row in rows],
        "tokens_beyond": beyond,
        "votes": [asdict(vote) for vote in votes],
    }
    return tell(
        record,
        *tables(rows, votes),
        f"tokens a choice beyond the decision: {beyond:.2f}",
        about=about,
        floors=floors(rows, beyond, votes),
        check=arguments.check,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
