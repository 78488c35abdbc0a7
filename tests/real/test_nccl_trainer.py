"""vLLM's own trainer code sends weights to a Motet server over NCCL, which is replaced by a library that moves bytes
through sockets."""

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest

from motet.control.nccl_receiver import NcclReceiver
from motet.engines.native.spawn import spawn_receiver
from motet.settings.server_config import environment
from tests.fault.answers import fetch_answer
from tests.fault.fault_requests import CHAT, chat
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess
from tests.memory_files import open_files
from tests.nccl.library import fake_nccl
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "vllm_trainer.py"
BODY = chat("a chat", n=3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("form", ["packed", "one by one"])
async def test_vllm_s_trainer_sends_the_weights_of_a_folder(
    vllm_folder: Path, folder: Path, forking: ForkingProcess, tmp_path: Path, form: str
) -> None:
    library = fake_nccl(tmp_path)
    other = save_tiny_tokenizer(save_tiny_model("llama", tmp_path / "other", seed=4))
    async with RunningCell(folder, spawn=forking.spawn, server={"rl": True}) as cell:
        cell.service.receiver = NcclReceiver(lambda: "cpu", start=spawn_receiver, library=library)
        old = await fetch_answer(cell.http, CHAT, BODY)
        assert (await cell.http.post("/update_weights", json={"weight_dir": str(other)})).status_code == 200
        new = await fetch_answer(cell.http, CHAT, BODY)
        for files, expected in (((other, folder), old), ((folder, other), new)):
            await send(vllm_folder, [cell.url, form, *(str(one / "model.safetensors") for one in files)], library)
            assert await fetch_answer(cell.http, CHAT, BODY) == expected
        assert old != new and open_files() == 1


async def send(vllm_folder: Path, arguments: list[str], library: str) -> None:
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    environ = {**kept, "VLLM_NCCL_SO_PATH": library, "VLLM_NO_USAGE_STATS": "1"}
    command = (str(vllm_folder / "bin" / "python"), str(SCRIPT), *arguments)
    trainer = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=environ)
    _, errors = await trainer.communicate()
    assert trainer.returncode == 0, errors.decode()[-4000:]
