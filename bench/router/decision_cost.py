"""Measures the time of one decision of Motet's code, for different numbers of workers and of blocks in the index."""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median

from bench.program.report import Cells
from motet.block_names import BlockName, block_names
from motet.routing.choosing.choose import choose
from motet.routing.choosing.cost import Candidate, GroupNeeds
from motet.routing.choosing.survey import shortlist
from motet.routing.workers.prefix_index import PrefixIndex
from motet.routing.workers.serving import WorkKind
from motet.settings.server_config import Policy

PROMPT_TOKENS = 1340
BLOCK_SIZE = 16
TURNS = 300


@dataclass(frozen=True)
class DecisionCost:
    workers: int
    blocks: int
    names_us: float
    """Time to compute the names of the prompt's blocks, which depends only on the length of the prompt."""
    overlap_us: float
    """Time to look up their holders: all workers hold a prefix, one holds the rest."""
    choice_us: float
    """Time for the shortlist, a candidate for each of its workers, and the choice."""
    bytes_per_block: float
    """Size of the index divided by the number of blocks, names included."""

    @property
    def total_us(self) -> float:
        return self.names_us + self.overlap_us + self.choice_us

    def cells(self) -> Cells:
        return [
            ("workers", self.workers, ""),
            ("blocks", self.blocks, ""),
            ("names us", self.names_us, ".0f"),
            ("overlap us", self.overlap_us, ".0f"),
            ("choice us", self.choice_us, ".0f"),
            ("total us", self.total_us, ".0f"),
            ("bytes per block", self.bytes_per_block, ".0f"),
        ]


def decision_cost(workers: int, blocks: int) -> DecisionCost:
    ids = [f"w{number}" for number in range(workers)]
    index, bytes_per_block = _filled(ids, blocks)
    prompt = list(range(PROMPT_TOKENS))
    names = block_names(prompt, BLOCK_SIZE, salt="")
    for id in ids:
        index.stored(id, names[:20])
    index.stored(ids[-1], names)
    random = Random(0)
    loads = {id: (random.randrange(4000), random.randrange(200), random.randrange(3000)) for id in ids}
    needs = GroupNeeds(work=WorkKind.GENERATE, choices=8, prompt_tokens=PROMPT_TOKENS, needs_prompt=True)

    def decide(turn: int) -> None:
        short = shortlist(ids, [overlap], session=ids[0], able=loads, turn=turn)
        candidates = [_candidate(id, loads[id], overlap.get(id, 0)) for id in short]
        choose(candidates, needs, policy=Policy.KV, turn=turn)

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


def _candidate(id: str, load: tuple[int, int, int], cached_blocks: int) -> Candidate:
    queued_tokens, choices, blocks = load
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
