"""The cases of `bench.scoring`: new requests for each round, the same for every server, and the result of a round."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client.fresh_prompts import FreshPrompts
from bench.scoring.requests import (
    Decisions,
    Dialect,
    EchoedPrompts,
    ReadScores,
    ScoringRequest,
    ScoringTarget,
    TextWindow,
)
from bench.servers.computed_tokens import computed_by

FEW_SHOT, DIFFERENT, PERPLEXITY, DECISIONS = CASES = ("few-shot", "different", "perplexity", "decisions")
WITHOUT_ECHO = {Dialect.LLAMA: (DECISIONS,)}
"""The cases of a server that reports no log-probabilities of prompts."""
TEMPLATE_TOKENS = 1024
"""Tokens that the instructions and the chat template add to a decision, at most."""


@dataclass(frozen=True)
class ScoringSizes:
    """Numbers of tokens, questions and options."""

    beginning: int
    """Tokens that all questions of the few-shot case start with."""
    question: int
    option: int
    questions: int
    options: int
    text: int
    """Tokens of the text whose perplexity is computed."""
    window: int
    stride: int
    input: int
    """Tokens of the input that all decisions are about."""
    decisions: int
    concurrency: int
    """Number of requests that a server gets at a time."""

    @property
    def max_prompt(self) -> int:
        return max(
            self.beginning + self.question + self.option, self.window, self.input + self.question + TEMPLATE_TOKENS
        )


@dataclass(frozen=True)
class ScoringRound:
    """Result of the requests of one case on one server."""

    prompts: int
    total_s: float
    scores: Sequence[ReadScores]
    computed: int | None
    """Number of prompt tokens that the server computed. None if the server does not report it."""

    @property
    def prompts_per_s(self) -> float:
        return self.prompts / self.total_s


def make_requests(case: str, fresh: FreshPrompts, sizes: ScoringSizes) -> list[ScoringRequest]:
    """Returns the requests of a case with new prompts."""
    match case:
        case "few-shot":
            beginning = fresh.next(sizes.beginning)
            return [_question(beginning, fresh, sizes) for _ in range(sizes.questions)]
        case "different":
            return [_separate(fresh, sizes) for _ in range(sizes.questions)]
        case "perplexity":
            return [*windows(fresh.random(sizes.text), sizes.window, sizes.stride)]
        case "decisions":
            questions = [fresh.words(sizes.question) for _ in range(sizes.decisions)]
            return [Decisions(fresh.words(sizes.input), questions)]
        case _:
            raise ValueError(f"there is no case {case!r}")


def windows(tokens: list[int], window: int, stride: int) -> list[TextWindow]:
    """Returns the windows of a text. Each token but the first is scored in exactly one of them.

    tokens     0 ... 2048                      window 0: scores 1 ... 2047
               512 ... 2560                    window 1: scores 2048 ... 2559
    """
    found = [TextWindow(tokens[:window], first=1)]
    scored = window
    while scored < len(tokens):
        end = min(scored + stride, len(tokens))
        found.append(TextWindow(tokens[end - window : end], first=window - (end - scored)))
        scored = end
    return found


async def run_round(to: ScoringTarget, requests: Sequence[ScoringRequest]) -> ScoringRound:
    """Sends all requests, as many at a time as the target allows, and counts the prompt tokens that are computed."""
    before = await computed_by(to.server)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(request.send(to)) for request in requests]
    total_s = time.perf_counter() - begin
    after = await computed_by(to.server)
    computed = None if before is None or after is None else after - before
    prompts = sum(request.num_prompts for request in requests)
    return ScoringRound(prompts, total_s, [task.result() for task in sent], computed)


def _question(beginning: list[int], fresh: FreshPrompts, sizes: ScoringSizes) -> EchoedPrompts:
    """Returns a question after the common beginning, with each of its options."""
    before = [*beginning, *fresh.next(sizes.question)]
    return EchoedPrompts([[*before, *fresh.next(sizes.option)] for _ in range(sizes.options)], len(before))


def _separate(fresh: FreshPrompts, sizes: ScoringSizes) -> EchoedPrompts:
    """Returns as many prompts as a question has options, of the same length, which have nothing in common."""
    length = sizes.beginning + sizes.question + sizes.option
    return EchoedPrompts([fresh.next(length) for _ in range(sizes.options)], length - sizes.option)
