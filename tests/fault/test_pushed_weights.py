"""A trainer pushes new weights to a running server with `motet.weights.push`, or to all workers of a gateway. They
answer like servers that were started with these weights, whatever process dies."""

import asyncio
import hashlib
import os
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from motet import weights
from motet.weights import Delivery, PushError
from tests.error_response import assert_error
from tests.fault.answers import fetch_answer
from tests.fault.children import BODIES, Servers, answer, client_of, until
from tests.fault.fault_requests import CHAT, chat
from tests.fault.faults import kill
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess
from tests.memory_files import open_files
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BODY = chat("a chat", n=3)
BODIES_OF_ONE_PROMPT = BODIES[:2]
KEY = "worker-key"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with other weights."""
    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("other"), seed=4))


@pytest.fixture(scope="module")
def old_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def new_tensors(other: Path) -> dict[str, torch.Tensor]:
    return load_file(other / "model.safetensors")


async def push(
    url: str, tensors: dict[str, torch.Tensor], *, way: Delivery | None = None, version: str | None = None
) -> str:
    return await asyncio.to_thread(weights.push, url, tensors, way=way, version=version)


async def test_pushed_weights_equal_a_folders_and_outlive_the_trainer_and_engines(
    folder: Path,
    other: Path,
    forking: ForkingProcess,
    old_tensors: dict[str, torch.Tensor],
    new_tensors: dict[str, torch.Tensor],
) -> None:
    async with RunningCell(folder, spawn=forking.spawn, server={"rl": True}) as cell:
        old = await fetch_answer(cell.http, CHAT, BODY)
        assert (await cell.http.post("/update_weights", json={"weight_dir": str(other)})).status_code == 200
        new, digest = await fetch_answer(cell.http, CHAT, BODY), cell.engine("decode-0").info.model_digest
        assert old != new
        for way in Delivery:
            assert await push(cell.url, old_tensors, way=way, version=f"old by {way}") == f"old by {way}"
            assert await fetch_answer(cell.http, CHAT, BODY) == old
            assert await push(f"{cell.url}/v1", new_tensors, way=way, version=f"new by {way}") == f"new by {way}"
            assert await fetch_answer(cell.http, CHAT, BODY) == new
            assert cell.engine("decode-0").info.model_digest == digest
            assert open_files() == 1, "the file of the weights that serve"
        for worker in ("prefill-0", "decode-0"):
            killed = cell.engine(worker)
            kill(killed)
            await killed.died.wait()
            await cell.restored()
            assert cell.engine(worker).info.weight_version == f"new by {Delivery.HTTP}"
        assert await fetch_answer(cell.http, CHAT, BODY) == new
        sums = (await cell.http.post("/weight_checker", json={"action": "checksum"})).json()["checksums"]
        name = "model.layers.0.mlp.gate_proj.weight"
        assert sums[name] == hashlib.sha256(new_tensors[name].numpy().data).hexdigest()
    assert open_files() == 0


@pytest.mark.parametrize("way", Delivery)
async def test_tensors_that_cannot_be_used_are_refused_by_name_and_nothing_changes(
    way: Delivery, folder: Path, forking: ForkingProcess, new_tensors: dict[str, torch.Tensor]
) -> None:
    wrong = {**new_tensors, "lm_head.weight": new_tensors["lm_head.weight"][:, :-1]}
    async with RunningCell(folder, spawn=forking.spawn, server={"rl": True, "admin_key": "admin"}) as cell:
        before = await fetch_answer(cell.http, CHAT, BODY)
        with pytest.raises(PushError, match="401: This route needs the server's admin key"):
            await push(cell.url, new_tensors, way=way)
        with pytest.raises(PushError, match=r"400: .*tensor lm_head\.weight: its shape is"):
            await asyncio.to_thread(weights.push, cell.url, wrong, way=way, admin_key="admin")
        with pytest.raises(ValueError, match=r"tensor a: its dtype is torch\.float64"):
            await push(cell.url, {"a": torch.zeros(2, dtype=torch.float64)}, way=way)
        assert await fetch_answer(cell.http, CHAT, BODY) == before
        assert open_files() == 0


async def test_a_push_goes_over_http_where_the_server_cannot_open_the_memory(
    folder: Path, forking: ForkingProcess, new_tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RunningCell(folder, spawn=forking.spawn, server={"rl": True}) as cell:
        monkeypatch.setattr("motet.models.memory_file.MEMORY_FILE", re.compile("none"))
        with pytest.raises(PushError, match="is not a file in memory"):
            await push(cell.url, new_tensors, way=Delivery.MEMORY)
        assert await push(cell.url, new_tensors) == "1"


async def test_a_gateway_sends_the_weights_to_all_workers_and_to_later_ones_too(
    folder: Path,
    other: Path,
    forking: ForkingProcess,
    old_tensors: dict[str, torch.Tensor],
    new_tensors: dict[str, torch.Tensor],
) -> None:
    """Tests a folder and tensors. One worker is restarted, one is stopped."""
    async with AsyncExitStack() as stack:
        servers = Servers(folder, stack, forking, "--rl", "--worker-key", KEY)
        await servers.start(2)
        urls = servers[0].url, servers[1].url
        settings = ("--worker-key", KEY, "--rl")
        gateway = await stack.enter_async_context(servers.gateway(*urls, settings=settings))
        http = await stack.enter_async_context(client_of(gateway))
        old = [await answer(http, body) for body in BODIES_OF_ONE_PROMPT]
        updated = await http.post("/update_weights", json={"weight_dir": str(other), "weight_version": "one"})
        assert (updated.status_code, updated.json()["weight_version"]) == (200, "one"), updated.text
        await until_version(http, "one")
        new = [await answer(http, body) for body in BODIES_OF_ONE_PROMPT]
        assert not set(new) & set(old)
        assert await push(gateway.url, old_tensors, version="two") == "two"
        for server in servers[0], servers[1], gateway:
            async with client_of(server) as own:
                assert [await answer(own, body) for body in BODIES_OF_ONE_PROMPT] == old
        assert await push(gateway.url, new_tensors, way=Delivery.HTTP, version="three") == "three"
        await servers.restart(1)
        async with client_of(servers[1]) as own:
            await until_version(own, "three", workers=1)  # the gateway can still have the report of the old process
            await until_version(http, "three")
            assert [await answer(own, body) for body in BODIES_OF_ONE_PROMPT] == new
        assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
        refused = await http.post("/update_weights", json={"weight_dir": "/nowhere"})
        assert_error(refused, status=400, param="weight_dir")
        os.kill(servers[0].pid, signal.SIGSTOP)
        try:
            await until(http, lambda workers: any(worker.state == "silent" for worker in workers))
            with pytest.raises(PushError, match=r"503: .*(is silent|has sent no heartbeat|sends no heartbeats)"):
                await push(gateway.url, old_tensors)
        finally:
            os.kill(servers[0].pid, signal.SIGCONT)
        await until_version(http, "three")
        assert [await answer(http, body) for body in BODIES_OF_ONE_PROMPT] == new


async def until_version(http: httpx.AsyncClient, version: str, *, workers: int = 2) -> None:
    await until(http, lambda reports: [one.weight_version for one in reports] == [version] * workers)
