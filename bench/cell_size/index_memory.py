"""Measures memory of the prefix index and its time for a block event, against the number of workers.

Each figure is the growth of the resident memory of a process of its own. A block with one holder costs the same for any
number of workers. A block with more holders has an integer of its own, with a bit for every worker up to the last
holder. So in a large cell the blocks that both a prefill and a decode worker have cost most:

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
"""Fewer blocks would not show in resident memory."""
SHARED_BLOCKS = 1000
EVENT_BLOCKS = 84
"""Blocks of an event: a prompt of 1340 tokens."""
TURNS = 200


@dataclass(frozen=True)
class IndexSize:
    """Memory in bytes for each pair of a block and a holder, names included; times in microseconds for each block."""

    workers: int
    blocks: int
    """Number of blocks in the index where each has one holder."""
    own_bytes: float
    pair_bytes: float
    shared_bytes: float
    stored_us: float
    """Time to store a block that nobody has."""
    joined_us: float
    """Time to store a block that others have: its holders are written anew."""
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
    """A fifth of the workers prefill, as in a cell with 4 decode workers for each. Returns 0 for a single worker."""
    if workers < 2:
        return 0.0
    ids = _ids(workers)
    prefill = max(1, workers // 5)

    def fill(index: PrefixIndex) -> None:
        _fill(index, ids[:prefill], blocks)
        _fill(index, ids[prefill:], blocks)

    return _grown(fill) / (2 * blocks)


def shared_bytes(workers: int) -> float:
    """Fills more blocks if there are few workers, so that the growth of memory shows."""
    blocks = max(SHARED_BLOCKS, LEAST_BLOCKS // workers)

    def fill(index: PrefixIndex) -> None:
        for id in _ids(workers):
            index.stored(id, names(0, blocks))

    return _grown(fill) / (blocks * workers)


def event_us(workers: int) -> tuple[float, float, float]:
    """Returns microseconds a block for events of the last worker: stored; stored where another has it; removed."""
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
    """Returns new objects at each call, because names from several workers are different objects too."""
    return [number.to_bytes(16) for number in range(first, first + count)]


def _us(work: Callable[[Sequence[BlockName]], None], event: Sequence[BlockName]) -> float:
    start = time.perf_counter()
    work(event)
    return (time.perf_counter() - start) / len(event) * 1e6


def _fill(index: PrefixIndex, ids: Sequence[str], blocks: int) -> None:
    """Stores blocks 0 to `blocks`, an even share for each worker."""
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
