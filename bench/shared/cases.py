"""Requests of `bench.shared`: the tokens that they share, the moments at which they are sent, and the results of a
round."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.client.fresh_prompts import FreshPrompts
from bench.client.load import TimedLoad, Timing
from bench.servers.compared_server import ComparedServer
from bench.servers.computed_tokens import computed_by

CASES = ("group", "separate", "few-shot", "different", "conversation")


@dataclass(frozen=True)
class CaseLengths:
    """Numbers of tokens and of requests."""

    ns: tuple[int, ...]
    prompt_tokens: int
    question_tokens: int
    """Number of tokens of a few-shot question, and of a user's message in a conversation."""
    max_tokens: int
    turns: int
    forks: int
    """Number of answers that are generated at once in each turn of a conversation."""

    @property
    def requests(self) -> int:
        """Returns the maximum number of choices that are generated at once."""
        return max(*self.ns, self.forks)

    @property
    def context(self) -> int:
        """Returns the maximum number of tokens that are kept at once if nothing is shared."""
        conversation = self.turns * (self.question_tokens + self.max_tokens)
        return self.requests * max(self.prompt_tokens + self.max_tokens, conversation)


@dataclass(frozen=True)
class RoundResult:
    """Times and tokens of one round of requests."""

    total_s: float
    tokens: int
    last_first_s: float | None = None
    """Time until every choice had a token. None if the answers were not streamed."""
    computed: int | None = None
    """Number of prompt tokens that the server computed. None if the server does not report it."""

    @classmethod
    def of(cls, timing: Timing) -> "RoundResult":
        return cls(timing.total_s, timing.tokens, timing.last_first_s)

    @property
    def tokens_per_s(self) -> float:
        """Returns all tokens divided by the total time."""
        return self.tokens / self.total_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Returns all tokens divided by the time after the last first token. None if that time is not known."""
        return None if self.last_first_s is None else self.tokens / (self.total_s - self.last_first_s)


SendCase = Callable[[TimedLoad], Awaitable[RoundResult]]


def median_round(rounds: Sequence[RoundResult]) -> RoundResult:
    """Returns the median of each figure."""
    firsts = [result.last_first_s for result in rounds if result.last_first_s is not None]
    computed = [result.computed for result in rounds if result.computed is not None]
    return RoundResult(
        median(result.total_s for result in rounds),
        rounds[0].tokens,
        median(firsts) if firsts else None,
        round(median(computed)) if computed else None,
    )


def make_case(name: str, n: int, fresh: FreshPrompts, lengths: CaseLengths) -> SendCase:
    """Returns the requests of a case with new prompts, which are the same for every server."""
    prompt_tokens, question_tokens = lengths.prompt_tokens, lengths.question_tokens
    match name:
        case "group":
            prompt = fresh.next(prompt_tokens)
            return timed(lambda load: load.group(prompt, n, seed=0))
        case "separate":
            prompt = fresh.next(prompt_tokens)
            return timed(lambda load: load.separate(prompt, n, seed=0))
        case "few-shot":
            prefix = fresh.next(prompt_tokens - question_tokens)
            questions = [[*prefix, *fresh.next(question_tokens)] for _ in range(n)]
            return timed(lambda load: load.groups(questions, 1, seed=0))
        case "different":
            prompts = [fresh.next(prompt_tokens) for _ in range(n)]
            return timed(lambda load: load.groups(prompts, 1, seed=0))
        case "conversation":
            messages = [fresh.next(question_tokens) for _ in range(lengths.turns)]
            return lambda load: hold_conversation(load, messages, n)
        case _:
            raise ValueError(f"there is no case {name!r}")


def timed(send: Callable[[TimedLoad], Awaitable[Timing]]) -> SendCase:
    async def case(load: TimedLoad) -> RoundResult:
        return RoundResult.of(await send(load))

    return case


async def hold_conversation(load: TimedLoad, messages: Sequence[list[int]], forks: int) -> RoundResult:
    """Holds a conversation in which every answer is generated `forks` times at once, and the first one is kept."""
    history: list[int] = []
    begin = time.perf_counter()
    for turn, message in enumerate(messages):
        history = [*history, *message]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(load.answer(history, seed=turn * forks + i)) for i in range(forks)]
        history = [*history, *answers[0].result()]
    return RoundResult(time.perf_counter() - begin, len(messages) * forks * load.max_tokens)


async def run_case(server: ComparedServer, load: TimedLoad, send: SendCase) -> RoundResult:
    """Sends the requests of a case to a server, and counts the prompt tokens that the server computes for them."""
    before = await computed_by(server)
    result = await send(load)
    after = await computed_by(server)
    return result if before is None or after is None else replace(result, computed=after - before)
