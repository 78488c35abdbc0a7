"""Measures the memory of the prefix index and its time per block event, for different numbers of workers.

Each figure is the growth of the resident memory of a new process. A block with one holder costs the same for any number
of workers. A block with several holders has an integer with a bit for every worker up to the last holder. So in a large
cell the most expensive blocks are those that a prefill and a decode worker hold:

    own      every block is held by one worker
    pairs    every block is held by two workers, as if prefill and decode are separate
    shared   every block is held by all workers, like the common prefix of all prompts
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
from motet.routing.workers.prefix_index import PrefixIndex

MIN_BLOCKS = 200_000
"""Minimum number of blocks, so that they show in resident memory."""
SHARED_BLOCKS = 1000
EVENT_BLOCKS = 84
"""Number of blocks of an event: a prompt of 1340 tokens."""
TURNS = 200


@dataclass(frozen=True)
class IndexSize:
    """Memory in bytes per pair of a block and a holder, names included; times in microseconds per block."""

    workers: int
    blocks: int
    """Number of blocks in the index in which each block has one holder."""
    own_bytes: float
    pair_bytes: float
    shared_bytes: float
    stored_us: float
    """Time to store a block that no worker holds."""
    joined_us: float
    """Time to store a block that another worker holds: its set of holders is replaced."""
    removed_us: float


def index_size(workers: int, blocks_a_worker: int) -> IndexSize:
    blocks = max(MIN_BLOCKS, workers * blocks_a_worker)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        own = processes.submit(own_bytes, workers, blocks).result()
        pair = processes.submit(pair_bytes, workers, blocks // 2).result()
        shared = processes.submit(shared_bytes, workers).result()
    stored_us, joined_us, removed_us = event_us(workers)
    return IndexSize(workers, blocks, own, pair, shared, stored_us, joined_us, removed_us)


def own_bytes(workers: int, blocks: int) -> float:
    return _grown(lambda index: _fill(index, _ids(workers), blocks)) / blocks


def pair_bytes(workers: int, blocks: int) -> float:
    """Gives blocks to prefill workers, a fifth of all, as in a cell with 4 decode workers for each. Returns 0 for one
    worker."""
    if workers < 2:
        return 0.0
    ids = _ids(workers)
    prefill = max(1, workers // 5)

    def fill(index: PrefixIndex) -> None:
        _fill(index, ids[:prefill], blocks)
        _fill(index, ids[prefill:], blocks)

    return _grown(fill) / (2 * blocks)


def shared_bytes(workers: int) -> float:
    """Uses more blocks if there are few workers, so that the growth of memory shows."""
    blocks = max(SHARED_BLOCKS, MIN_BLOCKS // workers)

    def fill(index: PrefixIndex) -> None:
        for id in _ids(workers):
            index.stored(id, names(0, blocks))

    return _grown(fill) / (blocks * workers)


def event_us(workers: int) -> tuple[float, float, float]:
    """Returns microseconds per block for events of the last worker: stored, stored while held by another, removed."""
    index, ids = PrefixIndex(), _ids(workers)
    for id in ids:
        index.stored(id, ())
    first, last = ids[0], ids[-1]
    stored, joined, removed = [], [], []
    for turn in range(TURNS):
        new = names(2 * turn * EVENT_BLOCKS, EVENT_BLOCKS)
        held = names((2 * turn + 1) * EVENT_BLOCKS, EVENT_BLOCKS)
        index.stored(first, held)
        stored.append(_us(lambda event: index.stored(last, event), new))
        joined.append(_us(lambda event: index.stored(last, event), held))
        removed.append(_us(lambda event: index.removed(last, event), held))
    return median(stored), median(joined), median(removed)


def names(first: int, count: int) -> list[BlockName]:
    """Returns new objects at each call, because names from different workers are different objects too."""
    return [number.to_bytes(16) for number in range(first, first + count)]


def _us(work: Callable[[Sequence[BlockName]], None], event: Sequence[BlockName]) -> float:
    start = time.perf_counter()
    work(event)
    return (time.perf_counter() - start) / len(event) * 1e6


def _fill(index: PrefixIndex, ids: Sequence[str], blocks: int) -> None:
    """Stores blocks 0 to `blocks`, an equal share for each worker."""
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
