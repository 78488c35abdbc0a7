"""The requests of `bench.shared`: what they have in common, when they are sent, and what one round of them took."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

from bench.client.load import Load, Timing
from bench.client.prompts import FreshPrompts
from bench.servers.compared_server import ComparedServer
from motet.metrics.declare import PREFIX

CASES = ("group", "separate", "few-shot", "different", "conversation")
COMPUTED = {
    (f"{PREFIX}prefill_tokens_total", None),
    ("vllm:prompt_tokens_by_source_total", "local_compute"),
    ("llamacpp:prompt_tokens_total", None),
}
"""Name, and `source` if it has one, of each server's counter of computed prompt tokens."""


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens and of requests."""

    ns: tuple[int, ...]
    prompt_tokens: int
    question_tokens: int
    """Tokens of a few-shot question, and of what the user says in a conversation."""
    max_tokens: int
    turns: int
    forks: int
    """Number of answers that are written at once at each turn of a conversation."""

    @property
    def requests(self) -> int:
        """Returns the most choices that are written at once."""
        return max(*self.ns, self.forks)

    @property
    def context(self) -> int:
        """Returns the most tokens that are kept at once if nothing is shared."""
        conversation = self.turns * (self.question_tokens + self.max_tokens)
        return self.requests * max(self.prompt_tokens + self.max_tokens, conversation)


@dataclass(frozen=True)
class Taken:
    """What one round of requests took."""

    total_s: float
    tokens: int
    last_first_s: float | None = None
    """Time until every choice had a token; None if the answers were not streamed."""
    computed: int | None = None
    """Prompt tokens that the server computed; None if it does not tell."""

    @classmethod
    def of(cls, timing: Timing) -> "Taken":
        return cls(timing.total_s, timing.tokens, timing.last_first_s)

    @property
    def tokens_per_s(self) -> float:
        """Returns all tokens divided by the whole time."""
        return self.tokens / self.total_s


Case = Callable[[Load], Awaitable[Taken]]


def typical(rounds: Sequence[Taken]) -> Taken:
    """Returns the median of each figure."""
    firsts = [one.last_first_s for one in rounds if one.last_first_s is not None]
    computed = [one.computed for one in rounds if one.computed is not None]
    return Taken(
        median(one.total_s for one in rounds),
        rounds[0].tokens,
        median(firsts) if firsts else None,
        round(median(computed)) if computed else None,
    )


def make_case(name: str, n: int, fresh: FreshPrompts, lengths: Lengths) -> Case:
    """Returns the requests of a case with prompts of their own, which are the same for every server."""
    prompt_tokens, question_tokens = lengths.prompt_tokens, lengths.question_tokens
    match name:
        case "group":
            prompt = fresh.next(prompt_tokens)
            return timed(lambda load: load.group(prompt, n, seed=0))
        case "separate":
            prompt = fresh.next(prompt_tokens)
            return timed(lambda load: load.separate(prompt, n, seed=0))
        case "few-shot":
            beginning = fresh.next(prompt_tokens - question_tokens)
            questions = [[*beginning, *fresh.next(question_tokens)] for _ in range(n)]
            return timed(lambda load: load.groups(questions, 1, seed=0))
        case "different":
            prompts = [fresh.next(prompt_tokens) for _ in range(n)]
            return timed(lambda load: load.groups(prompts, 1, seed=0))
        case "conversation":
            said = [fresh.next(question_tokens) for _ in range(lengths.turns)]
            return lambda load: talk(load, said, n)
        case _:
            raise ValueError(f"there is no case {name!r}")


def timed(send: Callable[[Load], Awaitable[Timing]]) -> Case:
    async def case(load: Load) -> Taken:
        return Taken.of(await send(load))

    return case


async def talk(load: Load, said: Sequence[list[int]], forks: int) -> Taken:
    """Holds a conversation whose every answer is written `forks` times at once; the first one is kept each time."""
    history: list[int] = []
    begin = time.perf_counter()
    for turn, message in enumerate(said):
        history = [*history, *message]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(load.answer(history, seed=turn * forks + i)) for i in range(forks)]
        history = [*history, *asked[0].result()]
    return Taken(time.perf_counter() - begin, len(said) * forks * load.max_tokens)


async def take(server: ComparedServer, load: Load, case: Case) -> Taken:
    """Sends the requests of a case to a server, and counts the prompt tokens that it computes for them."""
    before = await computed_by(server)
    taken = await case(load)
    after = await computed_by(server)
    return taken if before is None or after is None else replace(taken, computed=after - before)


async def computed_by(server: ComparedServer) -> int | None:
    """Returns the number of prompt tokens that a server has computed so far, once it has been quiet for a while."""
    await asyncio.sleep(server.style.settle_s)
    return computed_in((await server.client.get("/metrics")).text)


def computed_in(exposition: str) -> int | None:
    samples = (sample for family in text_string_to_metric_families(exposition) for sample in family.samples)
    counts = [one.value for one in samples if (one.name, one.labels.get("source")) in COMPUTED]
    return int(sum(counts)) if counts else None
