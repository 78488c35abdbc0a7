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
    ScoringClient,
    ScoringRequest,
    TextWindow,
)
from bench.servers.computed_tokens import computed_by

FEW_SHOT, DIFFERENT, PERPLEXITY, DECISIONS = CASES = ("few-shot", "different", "perplexity", "decisions")
CASES_WITHOUT_ECHO = {Dialect.LLAMA: (DECISIONS,)}
"""The cases of servers that do not report log-probabilities of prompts."""
TEMPLATE_TOKENS = 1024
"""Maximum number of tokens that the instructions and the chat template add to a decision."""


@dataclass(frozen=True)
class ScoringSizes:
    """Numbers of tokens, questions and options."""

    beginning: int
    """Tokens of the common prefix of all questions in the few-shot case."""
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
            prefix = fresh.next(sizes.beginning)
            return [_question(prefix, fresh, sizes) for _ in range(sizes.questions)]
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

    window 0    tokens [0, 2048)        scores [1, 2048)
    window 1    tokens [512, 2560)      scores [2048, 2560)
    """
    found = [TextWindow(tokens[:window], first=1)]
    scored = window
    while scored < len(tokens):
        end = min(scored + stride, len(tokens))
        found.append(TextWindow(tokens[end - window : end], first=window - (end - scored)))
        scored = end
    return found


async def run_round(client: ScoringClient, requests: Sequence[ScoringRequest]) -> ScoringRound:
    """Sends all requests within the client's limit, and counts the prompt tokens that the server computes."""
    before = await computed_by(client.server)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(request.send(client)) for request in requests]
    total_s = time.perf_counter() - begin
    after = await computed_by(client.server)
    computed = None if before is None or after is None else after - before
    prompts = sum(request.num_prompts for request in requests)
    return ScoringRound(prompts, total_s, [task.result() for task in sent], computed)


def _question(prefix: list[int], fresh: FreshPrompts, sizes: ScoringSizes) -> EchoedPrompts:
    """Returns the prompts of a question: the common prefix, the question and one of its options."""
    before = [*prefix, *fresh.next(sizes.question)]
    return EchoedPrompts([[*before, *fresh.next(sizes.option)] for _ in range(sizes.options)], len(before))


def _separate(fresh: FreshPrompts, sizes: ScoringSizes) -> EchoedPrompts:
    """Returns prompts like the prompts of a question, but without a common prefix."""
    length = sizes.beginning + sizes.question + sizes.option
    return EchoedPrompts([fresh.next(length) for _ in range(sizes.options)], length - sizes.option)
