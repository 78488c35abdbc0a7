"""Memory of the prefix index, and what a block event costs it, against the number of workers: real code, real memory.

Each figure is taken in a process of its own, as growth of its resident memory. A block with one holder costs the same
whatever the number of workers. One with more has an integer of its own, with a bit for every worker up to the last of
them, so in a large cell the blocks that a prefill and a decode worker both have are the dear ones:

    own      every block is held by one worker
    pairs    every block is held by two, as where prefill and decode are apart
    shared   every block is held by all, as the beginning that all prompts have
"""

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import psutil

from motet.block_names import BlockName
from motet.routing.prefix_index import PrefixIndex

LEAST_BLOCKS = 200_000
"""So many at least, that resident memory can tell."""
SHARED_BLOCKS = 1000
EVENT_BLOCKS = 84
"""Of an event: a prompt of 1340 tokens."""
TURNS = 200


@dataclass(frozen=True)
class IndexSize:
    """Bytes are of a block and each of its holders, names included."""

    workers: int
    blocks: int
    """Entries of the index with blocks of one holder."""
    own_bytes: float
    pair_bytes: float
    shared_bytes: float
    stored_us: float
    """A block that nobody has, until it can be found."""
    joined_us: float
    """A block that others have: its holders are written anew."""
    removed_us: float


def index_size(workers: int, blocks_a_worker: int) -> IndexSize:
    blocks = max(LEAST_BLOCKS, workers * blocks_a_worker)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        own = processes.submit(own_bytes, workers, blocks).result()
        pair = processes.submit(pair_bytes, workers, blocks // 2).result()
        shared = processes.submit(shared_bytes, workers).result()
    stored_us, joined_us, removed_us = event_us(workers)
    return IndexSize(workers, blocks, own, pair, shared, stored_us, joined_us, removed_us)


def own_bytes(workers: int, blocks: int) -> float:
    return _grown(lambda index: _fill(index, _ids(workers), blocks)) / blocks


def pair_bytes(workers: int, blocks: int) -> float:
    """A fifth of the workers prefill, as in a cell of 4 decode workers a prefill worker; 0 for a lone worker."""
    if workers < 2:
        return 0.0
    ids = _ids(workers)
    prefill = max(1, workers // 5)

    def fill(index: PrefixIndex) -> None:
        _fill(index, ids[:prefill], blocks)
        _fill(index, ids[prefill:], blocks)

    return _grown(fill) / (2 * blocks)


def shared_bytes(workers: int) -> float:
    """Of few workers, by so many more blocks."""
    blocks = max(SHARED_BLOCKS, LEAST_BLOCKS // workers)

    def fill(index: PrefixIndex) -> None:
        for id in _ids(workers):
            index.stored(id, names(0, blocks))

    return _grown(fill) / (blocks * workers)


def event_us(workers: int) -> tuple[float, float, float]:
    """Microseconds a block, by the last of the workers: stored, stored where another has it, removed there."""
    index, ids = PrefixIndex(), _ids(workers)
    for id in ids:
        index.stored(id, ())
    first, last = ids[0], ids[-1]
    stored, joined, removed = [], [], []
    for turn in range(TURNS):
        mine = names(2 * turn * EVENT_BLOCKS, EVENT_BLOCKS)
        others = names((2 * turn + 1) * EVENT_BLOCKS, EVENT_BLOCKS)
        index.stored(first, others)
        stored.append(_us(lambda event: index.stored(last, event), mine))
        joined.append(_us(lambda event: index.stored(last, event), others))
        removed.append(_us(lambda event: index.removed(last, event), others))
    return median(stored), median(joined), median(removed)


def names(first: int, count: int) -> list[BlockName]:
    """Made anew for whoever tells of them, as they are when they come from several workers."""
    return [number.to_bytes(16) for number in range(first, first + count)]


def _us(work: Callable[[Sequence[BlockName]], None], event: Sequence[BlockName]) -> float:
    start = time.perf_counter()
    work(event)
    return (time.perf_counter() - start) / len(event) * 1e6


def _fill(index: PrefixIndex, ids: Sequence[str], blocks: int) -> None:
    """Blocks 0 to `blocks`, an even share a worker."""
    for number, id in enumerate(ids):
        begin, end = number * blocks // len(ids), (number + 1) * blocks // len(ids)
        index.stored(id, names(begin, end - begin))


def _grown(fill: Callable[[PrefixIndex], None]) -> float:
    index, process = PrefixIndex(), psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    fill(index)
    gc.collect()
    return float(process.memory_info().rss - before)


def _ids(workers: int) -> list[str]:
    return [f"w{number}" for number in range(workers)]
