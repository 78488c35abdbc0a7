"""Measures the cost of a group policy, and the tokens and the time that it saves.

1. A policy that never ends a choice: tokens per second of 32 choices with the policy and without it, in turn.
2. From the decision to freed rows: number of tokens that the engine generates, for each choice ended by a decision, in
   addition to the tokens of the answer. One is the token of the step that runs at that moment.
3. Sums with a majority vote by Adaptive-Consistency's rule (posterior 0.95), in three ways: all 40 answers; a group
   with a policy; a client that applies the same rule to requests with n = 1, sends several at a time, and cancels the
   rest when the rule is met. Seeds are the same, and so are the answers. The engine counts the generated tokens.

Targets (`--check` fails if one is missed): a policy that never ends a choice keeps 0.99 of the tokens per second; a
decision costs at most two tokens per choice; a group generates no more tokens than the client's loop, and takes less
time.

Run: python -m bench.policies [--ns 32] [--repeats 9] [--check]
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import mean, median

import httpx
import msgspec

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import LoadSetup, TimedLoad, load_parser, open_client
from bench.program.command_line import progress
from bench.program.report import Bound, Cells, Target, machine, print_report, table
from bench.servers.motet_server import counters, motet_server
from examples.self_consistency.questions import make_questions
from motet.deploy.child import CounterSnapshot
from motet.policies.criteria import Answers, Posterior
from motet.policies.extract import Extract, ExtractKind

PLAIN = "none"
FREE = ("agree", "vote, deterministic")
"""Policies that must cost nothing."""
SAMPLES = 40
AT_A_TIME = 4
POSTERIOR = 0.95
SUM_TOKENS = 64
QUESTIONS = 12
ENDS = list(range(0, 49_000, 60))
"""Tokens that end a choice: one of them is sampled about every 60 tokens."""


@dataclass(frozen=True)
class PolicyOverhead:
    policy: str
    tokens_per_s: float
    share: float
    """Median ratio of the tokens per second with the policy and without it, in consecutive requests."""

    def cells(self) -> Cells:
        return [
            ("policy that never ends a choice", self.policy, "<"),
            ("tokens/s", self.tokens_per_s, ".0f"),
            ("/ without", self.share, ".3f"),
        ]


@dataclass(frozen=True)
class VoteCost:
    """The cost of all questions in one way."""

    way: str
    tokens: int
    """Number of tokens that the engine generated."""
    seconds: float
    samples: float
    """Mean number of answers that were started."""
    same: float
    """Share of the questions whose majority equals the majority of all answers."""

    def cells(self) -> Cells:
        return [
            ("sums, posterior 0.95", self.way, "<"),
            ("tokens", self.tokens, ""),
            ("seconds", self.seconds, ".1f"),
            ("answers", self.samples, ".1f"),
            ("same", self.same, ".2f"),
        ]


class _VotedChoice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _CompletionUsage(msgspec.Struct):
    completion_tokens: int


class _GroupReport(msgspec.Struct):
    begun: int
    aborted: int
    vote: dict[str, object] | None = None


class _VotedAnswer(msgspec.Struct):
    choices: list[_VotedChoice]
    usage: _CompletionUsage
    groups: list[_GroupReport] = []


def silent_policies(n: int) -> dict[str, dict[str, object]]:
    """Returns policies that never end a choice of n. The last one uses log-probabilities, which add work in the
    engine."""
    return {
        "none": {},
        "agree": {"stop_when": {"agree": n}, "extract": {"regex": "answer is (\\d+)"}},
        "vote, deterministic": {"vote": True, "extract": "last_number", "deterministic": True},
        "confidence": {"confidence": {"window": 16, "below": -1.0, "top": 5}},
    }


async def overheads(client: httpx.AsyncClient, setup: LoadSetup) -> list[PolicyOverhead]:
    n = setup.ns[0]
    plain = TimedLoad(client, setup.max_tokens, count_blocks=False)
    fresh = FreshPrompts(await plain.tokens_of(TEXT), seed=new_seed())
    policies = silent_policies(n)
    speeds: dict[str, list[float]] = {name: [] for name in policies}
    await plain.group(fresh.next(setup.prompt_tokens), n, seed=0)  # warm-up
    for repeat in range(setup.repeats):
        names = list(policies)
        for name in names if repeat % 2 else reversed(names):
            load = replace(plain, prepare=AddPolicy(policies[name])) if policies[name] else plain
            timing = await load.group(fresh.next(setup.prompt_tokens), n, seed=repeat)
            speeds[name].append(timing.decode_tokens_per_s)
        progress(", ".join(f"{name} {figures[-1]:.0f}" for name, figures in speeds.items()) + " tokens/s")
    return [
        PolicyOverhead(
            name,
            median(figures),
            median(with_policy / without for with_policy, without in zip(figures, speeds[PLAIN], strict=True)),
        )
        for name, figures in speeds.items()
    ]


class AddPolicy:
    """Adds a policy to the body of a request."""

    def __init__(self, group: Mapping[str, object]) -> None:
        self._group = group

    async def __call__(self, body: dict[str, object]) -> dict[str, object]:
        return body | {"group": self._group}


async def tokens_beyond(client: httpx.AsyncClient, setup: LoadSetup) -> float:
    """Returns the mean number of tokens that the engine generates for a choice after the decision that ended it."""
    prompt = await TimedLoad(client, 1).tokens_of(TEXT[: 4 * setup.prompt_tokens])
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


async def complete(client: httpx.AsyncClient, body: Mapping[str, object]) -> _VotedAnswer:
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=_VotedAnswer)


@dataclass(frozen=True)
class VoteBench:
    """Sends all questions in one way after the other."""

    client: httpx.AsyncClient
    prompts: Sequence[str]

    def body(self, prompt: str, n: int, *, seed: int) -> dict[str, object]:
        sampling = {"temperature": 0.6, "max_tokens": SUM_TOKENS, "stop": ["\n\n"]}
        return {"prompt": prompt, "n": n, "seed": seed} | sampling

    async def all_answers(self) -> tuple[VoteCost, list[str | None]]:
        """Returns the cost of all answers, and the majority of each question."""
        return await self._groups("all answers", {"vote": True, "extract": "last_number"}, [])

    async def with_policy(self, majorities: Sequence[str | None]) -> VoteCost:
        group = {"stop_when": {"posterior": POSTERIOR}, "extract": "last_number", "vote": True, "start": AT_A_TIME}
        vote, _ = await self._groups("a group with a policy", group, majorities)
        return vote

    async def _groups(
        self, way: str, group: Mapping[str, object], majorities: Sequence[str | None]
    ) -> tuple[VoteCost, list[str | None]]:
        before, started_s = await counters(self.client), time.monotonic()
        found, samples = list[str | None](), 0
        for number, prompt in enumerate(self.prompts):
            answer = await complete(self.client, self.body(prompt, SAMPLES, seed=1000 * number) | {"group": group})
            (report,) = answer.groups
            samples += report.begun
            value = (report.vote or {}).get("majority")
            found.append(value if isinstance(value, str) else None)
        return await self._cost(
            way, before, started_s=started_s, samples=samples, found=found, majorities=majorities or found
        ), found

    async def by_client(self, majorities: Sequence[str | None]) -> VoteCost:
        before, started_s = await counters(self.client), time.monotonic()
        found, samples = list[str | None](), 0
        for number, prompt in enumerate(self.prompts):
            loop = ClientLoop(self, prompt, first_seed=1000 * number)
            found.append(await loop.run())
            samples += loop.started
        return await self._cost(
            "a client's loop", before, started_s=started_s, samples=samples, found=found, majorities=majorities
        )

    async def _cost(
        self,
        way: str,
        before: CounterSnapshot,
        *,
        started_s: float,
        samples: int,
        found: Sequence[str | None],
        majorities: Sequence[str | None],
    ) -> VoteCost:
        seconds = time.monotonic() - started_s
        spent = (await counters(self.client)) - before
        same = mean(value == majority for value, majority in zip(found, majorities, strict=True))
        cost = VoteCost(way, spent.generation_tokens, seconds, samples / len(self.prompts), same)
        progress(f"{way}: {cost.tokens} tokens, {seconds:.1f} s")
        return cost


class ClientLoop:
    """Adaptive-Consistency as clients implement it: requests with n = 1, some at a time, until the rule is met."""

    def __init__(self, bench: VoteBench, prompt: str, *, first_seed: int) -> None:
        self.started = 0
        self._bench = bench
        self._prompt = prompt
        self._first_seed = first_seed
        self._answers = Answers(SAMPLES)
        self._extract = Extract(ExtractKind.LAST_NUMBER)
        self._rule = Posterior(POSTERIOR)

    async def run(self) -> str | None:
        """Returns the majority when the rule is met, or when no answer is left."""
        running: set[asyncio.Task[tuple[int, str]]] = set()
        met = False
        while not met and (self.started < SAMPLES or running):
            while self.started < SAMPLES and len(running) < AT_A_TIME:
                running.add(asyncio.create_task(self._sample(self.started)))
                self.started += 1
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, text = task.result()
                self._answers.finish(index, self._extract.value(text))
            met = self._rule.met(self._answers) is not None
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        majority = self._answers.leader
        return None if majority is None else majority.value

    async def _sample(self, index: int) -> tuple[int, str]:
        body = self._bench.body(self._prompt, 1, seed=self._first_seed + index)
        (choice,) = (await complete(self._bench.client, body)).choices
        return index, choice.text


async def measure(url: str, setup: LoadSetup) -> tuple[list[PolicyOverhead], float, list[VoteCost]]:
    async with open_client(url) as client:
        rows = await overheads(client, setup)
        beyond = await tokens_beyond(client, setup)
        votes = VoteBench(client, [question.prompt for question in make_questions(QUESTIONS, seed=1)])
        all_answers, majorities = await votes.all_answers()
        return rows, beyond, [all_answers, await votes.with_policy(majorities), await votes.by_client(majorities)]


def targets(rows: Sequence[PolicyOverhead], beyond: float, votes: Sequence[VoteCost]) -> list[Target]:
    _, group, loop = votes
    return [
        *(
            Target(f"tokens/s with {row.policy} / without", row.share, 0.99, Bound.AT_LEAST)
            for row in rows
            if row.policy in FREE
        ),
        Target("tokens per choice after the decision", beyond, 2.0),
        Target("tokens of a group / of a client's loop", group.tokens / loop.tokens, 1.0),
        Target("seconds of a group / of a client's loop", group.seconds / loop.seconds, 1.0),
    ]


def main(argv: Sequence[str]) -> int:
    parser = load_parser("bench.policies", __doc__, ns=(32,), prompt_tokens=400, max_tokens=128, repeats=9)
    arguments = parser.parse_args(argv)
    conditions = machine()
    with ExitStack() as stack:
        url = stack.enter_context(motet_server(arguments.model)).url
        rows, beyond, votes = asyncio.run(measure(url, LoadSetup.of(arguments)))
    record = {
        "overhead": [asdict(row) for row in rows],
        "tokens_beyond": beyond,
        "votes": [asdict(vote) for vote in votes],
    }
    return print_report(
        record,
        table(row.cells() for row in rows),
        table(vote.cells() for vote in votes),
        f"tokens per choice after the decision: {beyond:.2f}",
        conditions=conditions,
        targets=targets(rows, beyond, votes),
        check=arguments.check,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
