"""Measures how often the next token of an answer could have been guessed, and what a guess would bring.

The default model answers prompts of several kinds, n times each, at some temperatures. The answers are then gone
through as an engine with guesses would write them: all choices of a group take a step at once, each with its guesses as
further rows, and keep the guesses that equal what was drawn. So the text is that of a run without guesses, and only
the number of steps and of their rows differs. Where guesses come from:

    prompt      what followed the last tokens when they stood in the prompt, or in the answer itself
    siblings    the same, also in what the other choices of the group have written so far
    history     the same, also in answers to the prompt that were written before, as in the next epoch of a training
    grammar     tokens that a JSON schema leaves no choice about; these need no draw
    both        grammar and siblings: after a guess, what the schema then leaves no choice about is guessed too

A step's time comes from the engine: that of as many choices as it has rows. Prints a table, and JSON on the last line.

Run: python -m bench.guesses [--n 8] [--max-tokens 160] [--temperatures 0,0.6,1] [--lengths 1,2,4,8] [--matches 1,2,3,4]
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.client.load import numbers, progress
from bench.results.report import machine, table, tell
from bench.roofline.step_parts import WHOLE, Stage
from bench.speculate.tasks import Task, long_text, tasks
from motet.grammar.compiled_grammar import Grammars, fill_masks, mask_words
from motet.ids import RequestId
from motet.models.model_source import resolve
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment
from motet.text.tokenizer import Tokenizer
from motet.types import GenerateRequest, Grammar, SamplingParams, choice_starts

LONGEST_MATCH = 8
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
STEPS = 12
SOURCES = ("prompt", "siblings", "history", "grammar", "both")
Tokens = Sequence[int]


@dataclass(frozen=True)
class Rule:
    """When to guess: the last `match` tokens, or more, stood somewhere before. At most `length` tokens are guessed."""

    match: int
    length: int


class Index:
    """Finds what followed the last tokens of a stream, where they stood last before, in any of its streams."""

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._streams: list[list[int]] = []
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}

    def open(self, tokens: Tokens = ()) -> int:
        self._streams.append([])
        for token in tokens:
            self.add(len(self._streams) - 1, token)
        return len(self._streams) - 1

    def add(self, stream: int, token: int) -> None:
        tokens = self._streams[stream]
        for length in range(self._shortest, min(LONGEST_MATCH, len(tokens)) + 1):
            self._places[tuple(tokens[-length:])] = stream, len(tokens)
        tokens.append(token)

    def guess(self, last: Tokens, most: int) -> list[int]:
        for length in range(min(LONGEST_MATCH, len(last)), self._shortest - 1, -1):
            if (place := self._places.get(tuple(last[-length:]))) is not None:
                stream, at = place
                return self._streams[stream][at : at + most]
        return []


@dataclass(frozen=True)
class Group:
    """The answers to one prompt."""

    task: str
    temperature: float
    prompt: tuple[int, ...]
    answers: list[list[int]]
    before: list[list[int]]
    """Other answers to it, written before."""
    forced: list[list[bool]]
    """For each token of each answer: True if the grammar left no choice."""


@dataclass
class Outcome:
    """Steps that a group takes, and what its guesses were worth."""

    rows: list[int]
    """Of each step."""
    tokens: int = 0
    forced: int = 0
    guessed: int = 0
    accepted: int = 0


class Walk:
    """Goes through a group's answers with guesses."""

    def __init__(self, group: Group, source: str, rule: Rule) -> None:
        self._group, self._rule = group, rule
        self._guesses, self._forces = source != "grammar", source in {"grammar", "both"}
        shared = Index(rule.match)
        shared.open(group.prompt)
        for answer in group.before if source == "history" else ():
            shared.open(answer)
        alone = source == "prompt"
        self._indexes = [Index(rule.match) if alone else shared for _ in group.answers]
        self._streams = [index.open(group.prompt) if alone else index.open() for index in self._indexes]
        self._contexts = [list(group.prompt[-LONGEST_MATCH:]) for _ in group.answers]
        self._places = [0] * len(group.answers)
        self.outcome = Outcome([])

    def run(self, most_rows: int) -> Outcome:
        """In steps in which guesses could make more rows than `most_rows`, nothing is guessed."""
        answers = self._group.answers
        while active := [i for i, answer in enumerate(answers) if self._places[i] < len(answer)]:
            may_guess = self._guesses and len(active) * (1 + self._rule.length) <= most_rows
            rows, steps = 0, []
            for i in active:
                more, taken = self._step(i, may_guess=may_guess)
                rows += more
                steps.append((i, taken))
            for i, taken in steps:
                self._take(i, taken)
            self.outcome.rows.append(rows)
        return self.outcome

    def _step(self, i: int, *, may_guess: bool) -> tuple[int, int]:
        """Returns the rows of a choice's step, and the tokens that it brings."""
        place, answer = self._places[i], self._group.answers[i]
        context, rows, guesses = self._contexts[i], 1, 0
        at = place + 1  # behind the token that the step draws anyhow, if no guess is right
        known = list(context)
        while at < len(answer):
            if self._forces and self._group.forced[i][at - 1]:
                at, rows = at + 1, rows + 1
                known.append(answer[at - 2])
                self.outcome.forced += 1
                continue
            guess = self._indexes[i].guess(known, 1) if may_guess and guesses < self._rule.length else []
            if not guess:
                break
            guesses, rows = guesses + 1, rows + 1
            if guess[0] != answer[at - 1]:
                left = len(self._indexes[i].guess([*known, *guess], self._rule.length - guesses))
                guesses, rows = guesses + left, rows + left
                break
            known.append(guess[0])
            at += 1
            self.outcome.accepted += 1
        self.outcome.guessed += guesses
        return rows, at - place

    def _take(self, i: int, count: int) -> None:
        place = self._places[i]
        for token in self._group.answers[i][place : place + count]:
            self._indexes[i].add(self._streams[i], token)
            self._contexts[i] = [*self._contexts[i], token][-LONGEST_MATCH:]
        self._places[i] += count
        self.outcome.tokens += count


class Recorder:
    """Writes answers with the engine in this process."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage = stage
        self.tokenizer = Tokenizer.load(folder)
        config = json.loads((folder / "config.json").read_text())
        self.vocab_size, eos = int(config["vocab_size"]), int(config["eos_token_id"])
        self._grammars = Grammars(lambda: self.tokenizer, vocab_size=self.vocab_size, eos_token_ids=(eos,))

    def groups(self, task: Task, *, n: int, max_tokens: int, temperature: float) -> list[Group]:
        prompts = task.prompts(self.tokenizer)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, grammar=task.grammar)
        n = 1 if sampling.greedy else n  # answers at temperature 0 are equal
        now, before = (self._answers(prompts, n, sampling, seed=seed) for seed in (1, 1000))
        return [
            Group(
                task.name,
                temperature,
                tuple(prompt),
                answers,
                earlier,
                [self._forced(task.grammar, one) for one in answers],
            )
            for prompt, answers, earlier in zip(prompts, now, before, strict=True)
        ]

    def _answers(
        self, prompts: Sequence[Tokens], n: int, sampling: SamplingParams, *, seed: int
    ) -> list[list[list[int]]]:
        core = self._stage.core
        written: dict[RequestId, list[list[int]]] = {}
        for number, prompt in enumerate(prompts):
            request_id = RequestId(f"{seed} {number}")
            written[request_id] = [[] for _ in range(n)]
            core.submit(
                GenerateRequest(
                    request_id=request_id, prompt=tuple(prompt), choices=choice_starts(n, seed), sampling=sampling
                )
            )
        while core.busy:
            for delta in core.step().deltas:
                for choice in delta.choices:
                    written[delta.request_id][choice.index] += choice.token_ids
        return [*written.values()]

    def _forced(self, grammar: Grammar | None, answer: Tokens) -> list[bool]:
        if grammar is None:
            return [False] * len(answer)
        matcher = self._grammars.get(grammar).matcher()
        mask = np.zeros((1, mask_words(self.vocab_size)), np.int32)
        forced = []
        for token in answer:
            fill_masks([matcher], mask)
            forced.append(int(np.bitwise_count(mask.view(np.uint32)).sum()) == 1)
            matcher.consume(token)
        return forced


def step_times(stage: Stage, rows: Sequence[int]) -> dict[int, float]:
    """Returns the median seconds of a step with each number of rows."""
    times = {}
    for count in rows:
        stage.begin(count)
        times[count] = median(stage.step()[WHOLE] for _ in range(STEPS))
        progress(f"{count} rows: {times[count] * 1e3:.1f} ms")
    return times


def seconds(rows: Sequence[int], times: Mapping[int, float]) -> float:
    return float(np.interp(rows, [*times], [*times.values()]).sum())


@dataclass(frozen=True)
class Figure:
    task: str
    temperature: float
    source: str
    n: int
    match: int
    length: int
    found: float
    """Tokens that were forced or guessed rightly, of all."""
    right: float
    """Guesses that were right, of all."""
    steps: float
    """Of those without guesses."""
    speed: float
    """Tokens per second, in terms of those without guesses."""


def figures(groups: Sequence[Group], rules: Sequence[Rule], times: Mapping[int, float]) -> Iterator[Figure]:
    """Yields for each source the rule that is fastest."""
    base = [Walk(group, "prompt", Rule(2, 0)).run(0) for group in groups]
    base_s = sum(seconds(one.rows, times) for one in base)
    first = groups[0]
    bound = any(any(forced) for group in groups for forced in group.forced)
    for source in SOURCES if bound else SOURCES[:3]:
        best: Figure | None = None
        for rule in rules if source != "grammar" else [Rule(0, 0)]:
            walked = [Walk(group, source, rule).run(max(times)) for group in groups]
            tokens, forced, guessed, accepted = (
                sum(getattr(one, name) for one in walked) for name in ("tokens", "forced", "guessed", "accepted")
            )
            figure = Figure(
                first.task,
                first.temperature,
                source,
                len(first.answers),
                rule.match,
                rule.length,
                found=(forced + accepted) / tokens,
                right=accepted / max(guessed, 1),
                steps=sum(len(one.rows) for one in walked) / sum(len(one.rows) for one in base),
                speed=base_s / sum(seconds(one.rows, times) for one in walked),
            )
            if best is None or figure.speed > best.speed:
                best = figure
        if best is not None:
            yield best


def alone(group: Group) -> list[Group]:
    """Returns each of the first answers as a group of its own."""
    return [
        replace(group, answers=[answer], forced=[forced])
        for answer, forced in zip(group.answers[:3], group.forced[:3], strict=True)
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model that the compiled kernels run in bf16")
    parser.add_argument("--n", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--temperatures", default="0,0.6,1", help="e.g. 0,0.6,1")
    parser.add_argument("--lengths", type=numbers, default=(1, 2, 4, 8), help="most tokens that are guessed at once")
    parser.add_argument(
        "--matches", type=numbers, default=(1, 2, 3, 4), help="least tokens that must have stood before"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about = machine()
    folder = resolve(arguments.model, cache=cache_folder(environment()), say=progress)
    stage = Stage(
        folder, threads=torch.get_num_threads(), most=max(ROWS), prompt_tokens=1340, steps=arguments.max_tokens
    )
    rules = [Rule(match, length) for match in arguments.matches for length in arguments.lengths]
    recorder = Recorder(stage, folder)
    recorded: defaultdict[tuple[str, float], list[Group]] = defaultdict(list)
    for task in tasks(long_text(Path(__file__).parents[1]), recorder.tokenizer):
        for temperature in map(float, arguments.temperatures.split(",")):
            groups = recorder.groups(task, n=arguments.n, max_tokens=arguments.max_tokens, temperature=temperature)
            recorded[task.name, temperature] = groups
            progress(f"{task.name} at {temperature}: {sum(len(a) for group in groups for a in group.answers)} tokens")
    times = step_times(stage, ROWS)
    stage.close()
    found = [
        figure
        for groups in recorded.values()
        for some in (groups, [single for group in groups for single in alone(group)])
        if len(groups[0].answers) > 1 or some is groups
        for figure in figures(some, rules, times)
    ]
    heads = [("task", "<"), ("temperature", ""), ("source", "<"), ("n", ""), ("match", ""), ("length", "")]
    heads += [("found", ".0%"), ("right", ".0%"), ("steps", ".2f"), ("speed", ".2f")]
    shown = table(heads, [[*asdict(figure).values()] for figure in found])
    record = {"step_ms": {rows: time * 1e3 for rows, time in times.items()}, "figures": [asdict(one) for one in found]}
    return tell(record, shown, about=about)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
