"""Measures the time of one decision, against the numbers of workers and of blocks in the index: real code."""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median

from motet.block_names import BlockName, block_names
from motet.routing.choosing.choose import choose
from motet.routing.choosing.cost import Candidate, GroupNeeds, WorkKind
from motet.routing.choosing.survey import shortlist
from motet.routing.workers.prefix_index import PrefixIndex
from motet.types import Policy

PROMPT_TOKENS = 1340
BLOCK_SIZE = 16
TURNS = 300


@dataclass(frozen=True)
class DecisionCost:
    workers: int
    blocks: int
    names_us: float
    """Time to name the blocks of the prompt, which depends only on its length."""
    overlap_us: float
    """Time to look up who has them: all workers have a beginning, one has the rest."""
    choice_us: float
    """Time for the shortlist, a candidate for every worker on it, and the choice."""
    bytes_per_block: float
    """Bytes of the index for each block, names included."""

    @property
    def total_us(self) -> float:
        return self.names_us + self.overlap_us + self.choice_us


def decision_cost(workers: int, blocks: int) -> DecisionCost:
    ids = [f"w{number}" for number in range(workers)]
    index, bytes_per_block = _filled(ids, blocks)
    prompt = list(range(PROMPT_TOKENS))
    names = block_names(prompt, BLOCK_SIZE, salt="")
    for id in ids:
        index.stored(id, names[:20])
    index.stored(ids[-1], names)
    random = Random(0)
    books = {id: (random.randrange(4000), random.randrange(200), random.randrange(3000)) for id in ids}
    wanted = GroupNeeds(work=WorkKind.GENERATE, choices=8, prompt_tokens=PROMPT_TOKENS, needs_prompt=True)

    def decide(turn: int) -> None:
        short = shortlist(ids, [overlap], session=ids[0], able=books, turn=turn)
        candidates = [_candidate(id, books[id], overlap.get(id, 0)) for id in short]
        choose(candidates, wanted, policy=Policy.KV, turn=turn)

    overlap = index.overlap(names)
    return DecisionCost(
        workers=workers,
        blocks=blocks,
        names_us=_microseconds(lambda _: block_names(prompt, BLOCK_SIZE, salt="")),
        overlap_us=_microseconds(lambda _: index.overlap(names)),
        choice_us=_microseconds(decide),
        bytes_per_block=bytes_per_block,
    )


def _filled(ids: list[str], blocks: int) -> tuple[PrefixIndex, float]:
    tracemalloc.start()
    index = PrefixIndex()
    for number, id in enumerate(ids):
        own = range(number * blocks // len(ids), (number + 1) * blocks // len(ids))
        index.stored(id, [_name(block) for block in own])
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return index, taken / blocks


def _name(block: int) -> BlockName:
    return block.to_bytes(16)


def _candidate(id: str, books: tuple[int, int, int], cached_blocks: int) -> Candidate:
    queued_tokens, choices, blocks = books
    return Candidate(
        id=id,
        cached_tokens=cached_blocks * BLOCK_SIZE,
        queued_tokens=queued_tokens,
        open_choices=choices,
        trunk_blocks=blocks,
        tail_blocks=blocks // 2,
        max_choices=256,
        num_blocks=6000,
        block_size=BLOCK_SIZE,
    )


def _microseconds(work: Callable[[int], object]) -> float:
    times = []
    for turn in range(TURNS):
        start = time.perf_counter()
        work(turn)
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)
