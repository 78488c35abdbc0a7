"""Hundreds of updates leave nothing behind: no memory, threads, files or blocks, in no process of the cell."""

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from motet.weights import Delivery, push
from tests.fault.answers import Answer, fetch_answer
from tests.fault.fault_requests import CHAT, chat
from tests.fault.running_cell import TWO_DECODE_ENGINES, RunningCell
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WARM_UP = 20
"""Number of updates before the first measurement. They fill thread pools and the buffers of connections."""
ANSWERED_EVERY = 20
WORKERS = ("decode-0", "decode-1")
MAX_GROWTH_BYTES = 12 * 2**20
"""Less than half of the memory that 60 leaked sets of weights would take."""


@dataclass(frozen=True)
class HeldResources:
    """Resources of a process of the cell."""

    threads: int
    files: int
    blocks: int
    memory_bytes: int

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.threads, self.files, self.blocks


@pytest.fixture(scope="module")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    other = save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("other"), seed=4))
    return folder, other


async def held(cell: RunningCell) -> dict[str, HeldResources]:
    resources = {}
    for name in WORKERS:
        process = psutil.Process(cell.engine(name).info.pid)
        blocks = (await cell.stats(name)).blocks_used
        resources[name] = HeldResources(
            process.num_threads(), process.num_fds(), blocks, process.memory_full_info().uss
        )
    return resources


async def updated(cell: RunningCell, folders: tuple[Path, Path], number: int) -> list[Answer]:
    """Updates the cell with both sets of weights in turn, delivered in each way in turn. Returns answers from between
    the updates."""
    answers = []
    sets: list[dict[str, torch.Tensor]] = [load_file(folder / "model.safetensors") for folder in folders]
    for i in range(number):
        which, way = (i + 1) % 2, (None, Delivery.MEMORY, Delivery.HTTP)[i % 3]
        if way is None:
            body = {"weight_dir": str(folders[which])}
            (await cell.http.post("/update_weights", json=body)).raise_for_status()
        else:
            await asyncio.to_thread(partial(push, cell.url, sets[which], way=way))
        if i % ANSWERED_EVERY in (0, 1):
            answers.append(await fetch_answer(cell.http, CHAT, chat("a chat", n=3)))
    return answers


@pytest.mark.long
@pytest.mark.parametrize("updates", [60, pytest.param(200, marks=pytest.mark.long)])
async def test_many_updates_leave_nothing_behind(
    updates: int, folders: tuple[Path, Path], forking: ForkingProcess
) -> None:
    async with RunningCell(folders[0], cell=TWO_DECODE_ENGINES, spawn=forking.spawn, server={"rl": True}) as cell:
        first = await updated(cell, folders, WARM_UP)
        assert first[0] != first[1]
        before = await held(cell)
        answers = await updated(cell, folders, updates)
        assert answers == first * (updates // WARM_UP)
        assert (await cell.http.get("/weight_info")).json() == {"weight_version": str(WARM_UP + updates)}
        after = await held(cell)
        async with asyncio.timeout(PATIENCE_S):  # a connection or a thread can end a moment after its last use
            while any(after[name].counts != before[name].counts for name in WORKERS):
                after = await held(cell)
        for name in WORKERS:
            was, now = before[name], after[name]
            assert now.counts == was.counts, name
            assert now.memory_bytes - was.memory_bytes < MAX_GROWTH_BYTES, name
        await cell.check_nothing_left()
