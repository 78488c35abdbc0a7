"""A trainer broadcasts new weights to a running server as vLLM's trainers do, and can die at any point. The server
always answers as a server that was started with its present weights. NCCL is replaced by a library that moves bytes
through sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from motet.control.nccl_receiver import NcclReceiver
from motet.engines.native.spawn import RECEIVER, spawn_receiver
from tests.deploy.gateways import RunningGateway
from tests.error_response import assert_error
from tests.fault.answers import Answer, fetch_answer
from tests.fault.fault_requests import CHAT, chat
from tests.fault.faults import kill
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess
from tests.memory_files import open_files
from tests.nccl.library import fake_nccl
from tests.nccl.running import trainer
from tests.nccl.trainer import Plan
from tests.patience import PATIENCE_S
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Receiver = Callable[..., NcclReceiver]
BODY = chat("a chat", n=3)
SMALL = 40_000
"""Size in bytes of a packed buffer. A model needs several buffers."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_nccl(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(scope="module")
def receiver(library: str, forking: ForkingProcess) -> Receiver:
    """Makes receivers whose process is forked."""
    return partial(NcclReceiver, lambda: "cpu", library=library, start=partial(forking.start_module, RECEIVER))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with other weights."""
    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("other"), seed=4))


@pytest.fixture(scope="module")
async def shared(folder: Path, receiver: Receiver, forking: ForkingProcess) -> AsyncIterator[RunningCell]:
    async with RunningCell(folder, spawn=forking.spawn, server={"rl": True}) as cell:
        cell.service.receiver = receiver()
        yield cell


@pytest.fixture(scope="module")
async def answers(shared: RunningCell, folder: Path, other: Path) -> tuple[Answer, Answer]:
    """The answers with the old and with the new weights."""
    old = await fetch_answer(shared.http, CHAT, BODY)
    assert (await shared.http.post("/update_weights", json={"weight_dir": str(other)})).status_code == 200
    new = await fetch_answer(shared.http, CHAT, BODY)
    assert old != new
    return old, new


@pytest.fixture
async def cell(shared: RunningCell, answers: object, folder: Path) -> AsyncIterator[RunningCell]:
    """The cell with the old weights. Afterwards nothing may be left of a trainer."""
    assert (await shared.http.post("/update_weights", json={"weight_dir": str(folder)})).status_code == 200
    yield shared
    assert (await shared.http.post("/shutdown_weight_transfer_engine")).status_code == 200
    await shared.restored()
    await shared.check_nothing_left()


def weights_of(folder: Path) -> str:
    return str(folder / "model.safetensors")


def receiver_pid(cell: RunningCell) -> int | None:
    assert cell.service.receiver is not None
    return cell.service.receiver.pid


@pytest.mark.parametrize(
    "form",
    [{"buffer_bytes": SMALL}, {"num_buffers": 1}, {"packed": False, "by_id": True}],
    ids=str,
)
async def test_broadcast_weights_equal_a_folders_and_outlive_the_trainer_and_engines(
    cell: RunningCell,
    forking: ForkingProcess,
    library: str,
    form: dict[str, object],
    folder: Path,
    other: Path,
    answers: tuple[Answer, Answer],
) -> None:
    old, new = answers
    files = [weights_of(one) for one in (other, folder, other)]
    async with trainer(Plan(cell.url, library, files, **form), forking) as running:  # type: ignore[arg-type]
        for number in range(3):
            await running.prints(f"updated {number}")
    assert await fetch_answer(cell.http, CHAT, BODY) == new != old
    assert open_files() == 1, "the file of the weights that serve"
    assert (await cell.http.get("/weight_info")).json() == {"weight_version": "nccl 2"}
    if form != {"buffer_bytes": SMALL}:
        return
    killed = cell.engine("decode-0")
    kill(killed)
    await killed.died.wait()
    assert (await cell.http.post("/shutdown_weight_transfer_engine")).status_code == 200
    await cell.restored()
    assert await fetch_answer(cell.http, CHAT, BODY) == new


async def test_a_gateway_receives_once_and_passes_the_weights_to_its_workers(
    cell: RunningCell,
    forking: ForkingProcess,
    receiver: Receiver,
    library: str,
    other: Path,
    answers: tuple[Answer, Answer],
) -> None:
    async with RunningGateway(cell.url, rl=True, admin_key="") as gateway:
        gateway.service.receiver = receiver()
        async with trainer(
            Plan(gateway.serving.url, library, [weights_of(other)], buffer_bytes=SMALL), forking
        ) as running:
            await running.prints("updated 0")
        assert await fetch_answer(gateway.http, CHAT, BODY) == await fetch_answer(cell.http, CHAT, BODY) == answers[1]
        assert (await cell.http.get("/weight_info")).json() == {"weight_version": "nccl 0"}


@pytest.mark.parametrize("deaf", [False, True], ids=["nccl notices", "nccl never notices"])
async def test_a_trainer_that_dies_in_an_update_leaves_the_old_weights_and_nothing_else(
    cell: RunningCell,
    forking: ForkingProcess,
    library: str,
    deaf: bool,
    other: Path,
    answers: tuple[Answer, Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if deaf:
        monkeypatch.setenv("FAKE_NCCL_DEAF", "1")
    plan = Plan(cell.url, library, [weights_of(other)], buffer_bytes=SMALL, halt_at=2)
    async with trainer(plan, forking) as running:
        await running.prints("sent 2")
        await until(cell, lambda: open_files() == 1)
        assert receiver_pid(cell) is not None
        await running.kill()
    await until(cell, lambda: cell.service.control is not None and cell.service.control.upload is None)
    assert (receiver_pid(cell), open_files()) == (None, 0)
    refused = await cell.http.post("/finish_weight_update")
    assert_error(refused, status=400, code="no_weight_update")
    await cell.http.post("/start_weight_update")
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    refused = await cell.http.post("/update_weights", json={"update_info": info})
    assert "POST /init_weight_transfer_engine" in refused.json()["error"]["message"]
    assert await fetch_answer(cell.http, CHAT, BODY) == answers[0]


async def test_a_second_trainer_takes_the_place_of_the_first(
    cell: RunningCell, forking: ForkingProcess, library: str, other: Path, answers: tuple[Answer, Answer]
) -> None:
    halting = Plan(cell.url, library, [weights_of(other)], buffer_bytes=SMALL, halt_at=1)
    async with trainer(halting, forking) as first:
        await first.prints("sent 1")
        await until(cell, lambda: open_files() == 1)
        async with trainer(Plan(cell.url, library, [weights_of(other)]), forking) as second:
            await second.prints("updated 0")
        assert await fetch_answer(cell.http, CHAT, BODY) == answers[1]
    assert open_files() == 1


async def test_a_shutdown_ends_an_open_update(
    cell: RunningCell, forking: ForkingProcess, library: str, other: Path
) -> None:
    plan = Plan(cell.url, library, [weights_of(other)], buffer_bytes=SMALL, halt_at=1)
    async with trainer(plan, forking) as running:
        await running.prints("sent 1")
        await until(cell, lambda: open_files() == 1)
        assert (await cell.http.post("/shutdown_weight_transfer_engine")).status_code == 200
        await until(cell, lambda: open_files() == 0)
        assert receiver_pid(cell) is None


@pytest.mark.long
async def test_a_trainer_that_cannot_be_reached_is_an_error(
    cell: RunningCell, receiver: Receiver, library: str
) -> None:
    cell.service.receiver = receiver(timeout_s=0.5)
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    refused = await init(cell, info)
    assert "did not do its part within 0.5 s" in refused
    cell.service.receiver = NcclReceiver(lambda: "cuda", start=spawn_receiver, library=library)
    assert "this server sees no CUDA device" in await init(cell, info)
    cell.service.receiver = receiver(library="/no such library")
    assert "NCCL cannot be used" in await init(cell, info)
    cell.service.receiver = receiver()


async def until(cell: RunningCell, holds: Callable[[], bool]) -> None:
    """Waits until a condition holds, while the server answers requests."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await cell.http.get("/health")


async def init(cell: RunningCell, info: dict[str, object]) -> str:
    """Returns the message of the refusal."""
    refused: httpx.Response = await cell.http.post("/init_weight_transfer_engine", json={"init_info": info})
    assert_error(refused, status=400, param="init_info")
    assert receiver_pid(cell) is None
    message: str = refused.json()["error"]["message"]
    return message
