"""Workers of the simulation of routing: the time of an engine's step, and the ends of prompts and choices.

Between two changes (a group arrives, a prompt is computed, a choice ends) all choices of a worker advance at the same
rate. So a worker is simulated from change to change and not step by step.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from motet.block_names import BlockName
from motet.routing.choosing import cost

BLOCK_SIZE = 16
ALMOST_ZERO = 1e-6


@dataclass(frozen=True)
class EngineTimes:
    """The capacity of an engine and the times of its step. Default: Motet's engine on two cores (docs/log.md)."""

    step_ms: float = 4.0
    choice_ms: float = cost.CHOICE_MS
    trunk_block_ms: float = cost.TRUNK_BLOCK_MS
    tail_block_ms: float = cost.TAIL_BLOCK_MS
    prompt_token_ms: float = cost.PROMPT_TOKEN_MS
    max_choices: int = 256
    num_blocks: int = 6000
    budget: int = 512
    starts_partially: bool = True
    """True if a group starts as soon as one of its choices can run. The choices above `max_choices` take turns."""

    def decode_ms(self, choices: float, trunk_blocks: int, tail_blocks: float) -> float:
        return choices * self.choice_ms + trunk_blocks * self.trunk_block_ms + tail_blocks * self.tail_block_ms

    def work_ms(self, prompt_tokens: int, prompt_blocks: int, lengths: Sequence[int]) -> float:
        """Returns the time of all work for a group, without the fixed time of a step."""
        trunk = max(lengths) * prompt_blocks * self.trunk_block_ms
        tails = sum(length**2 for length in lengths) / 2 / BLOCK_SIZE * self.tail_block_ms
        return prompt_tokens * self.prompt_token_ms + sum(lengths) * self.choice_ms + trunk + tails


ENGINES = {
    "cpu": EngineTimes(),
    # An estimate for a GPU: prompts and choices are cheap, a step and the memory that it reads are not.
    "gpu": EngineTimes(
        step_ms=8.0,
        choice_ms=0.03,
        trunk_block_ms=0.004,
        tail_block_ms=0.004,
        prompt_token_ms=0.03,
        num_blocks=30_000,
        budget=2048,
    ),
}


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A group and its progress."""

    number: int
    arrival_s: float
    names: Sequence[BlockName]
    prompt_tokens: int
    lengths: Sequence[int]
    """Number of tokens of each choice."""
    session: str | None
    cached_tokens: int = 0
    expected_uncached: int = 0
    """Number of prompt tokens that the router expects the worker to compute."""
    remaining_tokens: float = 0.0
    """Number of prompt tokens that are not yet computed."""
    open: int = 0
    """Number of choices that have not ended."""
    first_s: float | None = None
    end_s: float | None = None

    @property
    def choices(self) -> int:
        return len(self.lengths)

    @property
    def prompt_blocks(self) -> int:
        return -(-self.prompt_tokens // BLOCK_SIZE)


class SimulatedCache:
    """The prefix cache of a worker. The least recently used block is evicted first, the end of a prefix before its
    start. Calls `stored` and `removed` with the names of blocks, as events report them to a router."""

    def __init__(
        self, size: int, *, stored: Callable[[list[BlockName]], None], removed: Callable[[list[BlockName]], None]
    ) -> None:
        self._size = size
        self._blocks: OrderedDict[BlockName, None] = OrderedDict()
        self._stored = stored
        self._removed = removed

    def cached_tokens(self, names: Sequence[BlockName]) -> int:
        count = 0
        for name in names:
            if name not in self._blocks:
                break
            count += 1
        return count * BLOCK_SIZE

    def put(self, names: Sequence[BlockName]) -> None:
        new = [name for name in names if name not in self._blocks]
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        self._stored(new)
        old = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._size)]
        if old:
            self._removed(old)


class SimulatedWorker:
    """A worker. Calls `changed` when a group has its first token and when a choice has ended."""

    def __init__(
        self,
        id: str,
        engine: EngineTimes,
        cache: SimulatedCache,
        changed: Callable[["SimulatedWorker", SimulatedGroup], None],
    ) -> None:
        self.id = id
        self.engine = engine
        self.cache = cache
        self.version = 0
        self.running = 0
        self.trunk_blocks = 0
        self._changed = changed
        self._waiting: deque[SimulatedGroup] = deque()
        self._reading: deque[SimulatedGroup] = deque()
        self._reserved = 0
        self._ends: list[tuple[float, float, int, SimulatedGroup]] = []
        """Step at the end, step at the start, number of the group and group of each running choice."""
        self._started_steps = 0.0
        """Sum over running choices of the step at which each started."""
        self._steps = 0.0
        self._now_s = 0.0
        self._step_s = 1.0
        self._chunk = 0.0

    @property
    def tail_blocks(self) -> float:
        tokens = self.running * self._steps - self._started_steps
        return tokens / BLOCK_SIZE + self.running / 2

    def submit(self, group: SimulatedGroup, now_s: float) -> None:
        self._advance(now_s)
        self._waiting.append(group)
        self._plan()

    def next_change_s(self) -> float | None:
        """Returns the time at which `change` must be called. Returns None if the worker is idle."""
        waits = [self._ends[0][0] - self._steps] if self._ends else []
        if self._reading:
            waits.append(self._reading[0].remaining_tokens / self._chunk)
        return self._now_s + max(0.0, min(waits)) * self._step_s if waits else None

    def change(self, now_s: float) -> None:
        self._advance(now_s)
        while self._reading and self._reading[0].remaining_tokens <= ALMOST_ZERO:
            self._fork(self._reading.popleft(), now_s)
        while self._ends and self._ends[0][0] <= self._steps + ALMOST_ZERO:
            _, started_step, _, group = heappop(self._ends)
            self._end(group, started_step, now_s)
        self._plan()

    def _advance(self, now_s: float) -> None:
        steps = (now_s - self._now_s) / self._step_s
        self._now_s = now_s
        self._steps += steps
        if self._reading:
            self._reading[0].remaining_tokens -= steps * self._chunk

    def _plan(self) -> None:
        """Admits groups that fit, and computes the time of a step until the next change."""
        while self._waiting and self._fits(self._waiting[0]):
            group = self._waiting.popleft()
            group.cached_tokens = min(self.cache.cached_tokens(group.names), group.prompt_tokens - 1)
            group.remaining_tokens = group.prompt_tokens - group.cached_tokens
            self._reserved += group.choices
            self.trunk_blocks += group.prompt_blocks
            self._reading.append(group)
        engine = self.engine
        turns = max(1.0, self.running / engine.max_choices)
        """Number of steps until each choice has one more token, which count as one step."""
        rows, tails = self.running / turns, self.tail_blocks / turns
        step_ms = engine.step_ms + engine.decode_ms(rows, self._trunks_read(), tails)
        if self._reading:
            chunk = min(engine.budget - rows, max(1.0, self._reading[0].remaining_tokens))
            step_ms += chunk * engine.prompt_token_ms
            self._chunk = chunk * turns
        self._step_s = turns * step_ms / 1e3
        self.version += 1

    def _trunks_read(self) -> int:
        return self.trunk_blocks - sum(group.prompt_blocks for group in self._reading)

    def _fits(self, group: SimulatedGroup) -> bool:
        blocks = self.trunk_blocks + self.tail_blocks + group.prompt_blocks + group.choices
        choices = 1 if self.engine.starts_partially else group.choices
        enough_choices = self.running + self._reserved + choices <= self.engine.max_choices
        return (enough_choices and blocks <= self.engine.num_blocks) or not self._reserved + self.running

    def _fork(self, group: SimulatedGroup, now_s: float) -> None:
        self.cache.put(group.names)
        self._reserved -= group.choices
        self.running += group.choices
        self._started_steps += group.choices * self._steps
        for length in group.lengths:
            heappush(self._ends, (self._steps + length, self._steps, group.number, group))
        group.first_s = now_s
        self._changed(self, group)

    def _end(self, group: SimulatedGroup, started_step: float, now_s: float) -> None:
        self.running -= 1
        self._started_steps -= started_step
        group.open -= 1
        if not group.open:
            self.trunk_blocks -= group.prompt_blocks
            group.end_s = now_s
        self._changed(self, group)
