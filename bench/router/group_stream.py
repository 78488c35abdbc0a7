"""Makes groups for the simulation of routing: heavy-tailed n, prompts with common prefixes, Poisson arrivals.

    n         half of all groups have one choice; one in ten has 32 or 64, and these have more than half of all choices
    prompts   half continue a session (a longer prefix of the same text each time); three in ten are few-shot prompts
              (one of several long prefixes, the first ones far more often, and a question); the others are new
    choices   lengths are exponential, 16 to 512 tokens, and the router does not know them

Load 1 is the capacity of all workers if a step had no fixed time and every block were computed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from bench.router.simulated_worker import BLOCK_SIZE, EngineTimes, SimulatedGroup
from motet.block_names import BlockName

CHOICES = {1: 0.50, 2: 0.12, 4: 0.11, 8: 0.10, 16: 0.07, 32: 0.06, 64: 0.04}
MEAN_ANSWER_TOKENS = 128
SESSIONS_A_WORKER = 12
TASKS_A_WORKER = 2
TURNS = 6
"""Mean number of prompts of a session."""


@dataclass(slots=True)
class _Text:
    """A text whose prefixes are prompts."""

    number: int
    tokens: int

    def names(self, tokens: int) -> list[BlockName]:
        return [(self.number << 16 | block).to_bytes(12) for block in range(tokens // BLOCK_SIZE)]


class _Prompts:
    """Samples prompts one after the other."""

    def __init__(self, random: Random, workers: int) -> None:
        self._random = random
        self._texts = 0
        self._sessions = [self._new(random.randrange(100, 800)) for _ in range(SESSIONS_A_WORKER * workers)]
        self._tasks = [self._new(random.randrange(800, 2400)) for _ in range(TASKS_A_WORKER * workers)]
        self._task_weights = list(accumulate(1 / rank for rank in range(1, len(self._tasks) + 1)))

    def sample(self) -> tuple[list[BlockName], int, str | None]:
        """Returns a prompt: the names of its full blocks, its number of tokens, and its session."""
        random = self._random
        kind = random.random()
        if kind < 0.5:
            return self._turn(random.randrange(len(self._sessions)))
        if kind < 0.8:
            task = random.choices(self._tasks, cum_weights=self._task_weights)[0]
            question = self._new(random.randrange(40, 200))
            return task.names(task.tokens) + question.names(question.tokens), task.tokens + question.tokens, None
        text = self._new(min(4000, int(random.lognormvariate(6.0, 0.8)) + 16))
        return text.names(text.tokens), text.tokens, None

    def _turn(self, place: int) -> tuple[list[BlockName], int, str | None]:
        text = self._sessions[place]
        prompt = text.names(text.tokens), text.tokens, f"s{text.number}"
        text.tokens += self._random.randrange(100, 500)
        if self._random.random() < 1 / TURNS or text.tokens > 4000:
            self._sessions[place] = self._new(self._random.randrange(100, 800))
        return prompt

    def _new(self, tokens: int) -> _Text:
        self._texts += 1
        return _Text(self._texts, tokens)


def groups(count: int, *, workers: int, load: float, engine: EngineTimes, seed: int) -> list[SimulatedGroup]:
    """Returns `count` groups in order of arrival."""
    random = Random(seed)
    prompts = _Prompts(random, workers)
    made = [_group(number, random, prompts) for number in range(count)]
    rate = load * workers * count / (sum(_work_ms(made, engine)) / 1e3)
    arrival_s = 0.0
    for group in made:
        arrival_s += random.expovariate(rate)
        group.arrival_s = arrival_s
    return made


def _group(number: int, random: Random, prompts: _Prompts) -> SimulatedGroup:
    n = random.choices(list(CHOICES), weights=list(CHOICES.values()))[0]
    lengths = [max(16, min(512, int(random.expovariate(1 / MEAN_ANSWER_TOKENS)))) for _ in range(n)]
    names, tokens, session = prompts.sample()
    return SimulatedGroup(number, 0.0, names, tokens, lengths, session, open=n)


def _work_ms(made: Sequence[SimulatedGroup], engine: EngineTimes) -> Iterator[float]:
    computed: set[BlockName] = set()
    for group in made:
        new = [name for name in group.names if name not in computed]
        computed.update(new)
        tokens = len(new) * BLOCK_SIZE + group.prompt_tokens % BLOCK_SIZE
        yield engine.work_ms(tokens, group.prompt_blocks, group.lengths)
