"""A trainer broadcasts new weights over the real NCCL, from one GPU to another, or on one GPU if NCCL allows two ranks
to share it (since version 2.30)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from motet.control.nccl_receiver import LIBRARY
from motet.settings.server_config import CellConfig
from tests.devices import GPU, ON_GPU
from tests.fault.answers import fetch_answer
from tests.fault.fault_requests import CHAT, chat
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess
from tests.memory_files import open_files
from tests.nccl.running import trainer
from tests.nccl.trainer import Plan
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

SHARING = (2, 30)
"""The first version of NCCL in which NCCL_MULTI_RANK_GPU_ENABLE lets ranks share a GPU."""
pytestmark = [pytest.mark.anyio, *ON_GPU]
BODY = chat("a chat", n=3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def trainer_s_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the trainer: the second GPU, or the only one."""
    if torch.cuda.device_count() > 1:
        return "cuda:1"
    if torch.cuda.nccl.version()[:2] < SHARING:  # type: ignore[no-untyped-call]
        pytest.skip("there is one GPU, and this version of NCCL does not allow two ranks to share it")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return GPU


@pytest.fixture
async def cell(folder: Path, forking: ForkingProcess) -> AsyncIterator[RunningCell]:
    together = CellConfig()
    async with RunningCell(folder, spawn=forking.spawn, cell=together, server={"rl": True}, device=GPU) as cell:
        yield cell


@pytest.mark.parametrize("packed", [True, False])
async def test_broadcast_weights_equal_those_of_a_folder(
    cell: RunningCell, forking: ForkingProcess, trainer_s_gpu: str, packed: bool, folder: Path, tmp_path: Path
) -> None:
    other = save_tiny_tokenizer(save_tiny_model("llama", tmp_path, seed=4))
    assert cell.service.receiver is not None and cell.service.receiver.device == GPU
    old = await fetch_answer(cell.http, CHAT, BODY)
    assert (await cell.http.post("/update_weights", json={"weight_dir": str(other)})).status_code == 200
    new = await fetch_answer(cell.http, CHAT, BODY)
    assert old != new
    files = [str(one / "model.safetensors") for one in (folder, other, folder)]
    plan = Plan(cell.url, LIBRARY, files, device=trainer_s_gpu, packed=packed, buffer_bytes=40_000)
    async with trainer(plan, forking) as running:
        for number in range(3):
            await running.prints(f"updated {number}")
    assert await fetch_answer(cell.http, CHAT, BODY) == old
    assert open_files() == 1, "the file of the weights that serve"
