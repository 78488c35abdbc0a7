"""The routes of a trainer that sends over NCCL: what they pass on to the receiver, and what they refuse by name."""

import base64
import os
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from motet.control.nccl_receiver import NcclReceiver
from motet.engines.native.spawn import spawn_receiver
from motet.errors import EngineError
from motet.models.checkpoint import TensorFacts
from motet.models.trainer_group import TrainerGroup
from tests.api.noted_control import NotedControl
from tests.api.serving import Served
from tests.error_response import assert_error
from tests.memory_files import open_files

pytestmark = pytest.mark.anyio

ID = bytes(range(128))
MEETING: dict[str, object] = {
    "master_address": "10.0.0.1",
    "master_port": 51216,
    "rank_offset": 1,
    "world_size": 2,
    "packed": True,
}
TENSORS = {"a": torch.arange(3, dtype=torch.float32), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
INFO: dict[str, object] = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[3], [2, 2]]}


class NotedReceiver(NcclReceiver):
    """Notes the group that it joins, and writes tensors as if a trainer had sent them."""

    def __init__(self) -> None:
        super().__init__(lambda: self.gpu, start=spawn_receiver)
        self.gpu: str | None = "cuda:0"
        self.group: TrainerGroup | None = None
        self.fails = False

    async def join(self, group: TrainerGroup) -> None:
        if self.fails:
            raise EngineError("there is no store of a trainer at 10.0.0.1:51216")
        self.group, self.joined = group, True

    async def receive(self, tensors: Sequence[TensorFacts], path: Path, *, at: int) -> None:
        if self.fails:
            raise EngineError("the trainer has gone")
        sent = b"".join(TENSORS[one.name].view(torch.uint8).numpy().tobytes() for one in tensors)
        descriptor = os.open(path, os.O_WRONLY)
        os.pwrite(descriptor, sent, at)
        os.close(descriptor)


@pytest.fixture
def receiver(trained: Served) -> NotedReceiver:
    noted = NotedReceiver()
    trained.service.receiver = noted
    return noted


async def init(served: Served, **info: object) -> httpx.Response:
    return await served.http.post("/init_weight_transfer_engine", json={"init_info": info})


async def announce(served: Served, **info: object) -> httpx.Response:
    return await served.http.post("/update_weights", json={"update_info": {**INFO, **info}})


@pytest.mark.parametrize("info", [MEETING, {"backend": "nccl"}, {"backend": "ipc"}])
async def test_a_server_without_a_gpu_refuses_nccl_at_once(
    trained: Served, receiver: NotedReceiver, info: dict[str, object]
) -> None:
    for there in (receiver, None):
        trained.service.receiver, receiver.gpu = there, None
        refused = await init(trained, **info)
        assert_error(refused, status=400, param="init_info")
        assert "motet.weights.push" in refused.text and "--device cuda" in refused.text
    assert receiver.group is None


async def test_a_group_is_joined_with_all_that_the_trainer_sends(trained: Served, receiver: NotedReceiver) -> None:
    assert (await init(trained, **MEETING)).status_code == 200
    by_address = TrainerGroup(
        rank=1,
        world_size=2,
        master_address="10.0.0.1",
        master_port=51216,
        packed=True,
        buffer_bytes=2**30,
        num_buffers=2,
    )
    assert receiver.group == by_address
    by_id = {"nccl_unique_id_b64": base64.b64encode(ID).decode(), "rank_offset": 2, "world_size": 3}
    assert (await init(trained, **by_id, packed_buffer_size_bytes=10, packed_num_buffers=3)).status_code == 200
    by_id_group = TrainerGroup(rank=2, world_size=3, unique_id=ID, packed=False, buffer_bytes=10, num_buffers=3)
    assert receiver.group == by_id_group
    assert (await init(trained)).status_code == 200
    assert not receiver.joined, "over HTTP there is no group"


@pytest.mark.parametrize(
    ("info", "field"),
    [
        ({"master_port": None}, "master_port"),
        ({"master_address": None}, "master_address"),
        ({"master_address": ""}, "master_address"),
        ({"master_port": 0}, "master_port"),
        ({"master_port": "51216"}, "master_port"),
        ({"rank_offset": None}, "rank_offset"),
        ({"rank_offset": 0}, "rank_offset"),
        ({"rank_offset": 2}, "rank_offset"),
        ({"world_size": None}, "world_size"),
        ({"world_size": 1}, "world_size"),
        ({"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes"),
        ({"packed_num_buffers": 17}, "packed_num_buffers"),
        ({"nccl_unique_id_b64": base64.b64encode(ID).decode()}, "nccl_unique_id_b64"),
        ({"master_address": None, "master_port": None, "nccl_unique_id_b64": "_-"}, "nccl_unique_id_b64"),
        ({"master_address": None, "master_port": None, "nccl_unique_id_b64": "AAAA"}, "nccl_unique_id_b64"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_an_impossible_group_is_refused_by_its_field(
    trained: Served, receiver: NotedReceiver, info: dict[str, object], field: str
) -> None:
    assert_error(await init(trained, **{**MEETING, **info}), status=400, param=f"init_info.{field}")
    assert receiver.group is None


async def test_announced_tensors_are_received_and_come_with_those_in_bodies(
    trained: Served, receiver: NotedReceiver, control: NotedControl
) -> None:
    await init(trained, **MEETING)
    assert_error(await announce(trained), status=400, code="no_weight_update")
    await trained.http.post("/start_weight_update")
    assert (await announce(trained)).json() == {"message": "Weights updated"}
    body = save({"c": torch.zeros(1)})
    binary = {"content-type": "application/octet-stream"}
    assert (await trained.http.post("/update_weights", content=body, headers=binary)).status_code == 200
    assert_error(await announce(trained), status=400, param="update_info.names")
    finished = await trained.http.post("/finish_weight_update", json={"weight_version": "5"})
    assert finished.json()["weight_version"] == "5"
    assert (control.calls, control.weights.tensors) == ([("memory", "5")], ["a", "b", "c"])
    assert open_files() == 0


@pytest.mark.parametrize(
    ("info", "field"),
    [
        ({"names": ["a", "a"]}, ".names"),
        ({"names": []}, ".names"),
        ({"dtype_names": None}, ".dtype_names"),
        ({"dtype_names": ["float32"]}, ".dtype_names"),
        ({"dtype_names": ["float32", "int8"]}, ".dtype_names"),
        ({"shapes": None}, ".shapes"),
        ({"shapes": [[3], [2, 2], [1]]}, ".shapes"),
        ({"shapes": [[3], [2, 0]]}, ".shapes"),
        ({"shapes": [[3], [-2, -2]]}, ".shapes"),
        ({"shapes": [[3], [2**30, 2**30]]}, ""),
    ],
)
async def test_an_invalid_announcement_names_its_field_and_the_update_stays_open(
    trained: Served, receiver: NotedReceiver, control: NotedControl, info: dict[str, object], field: str
) -> None:
    await init(trained, **MEETING)
    await trained.http.post("/start_weight_update")
    assert_error(await announce(trained, **info), status=400, param=f"update_info{field}")
    assert open_files() == 0
    assert (await announce(trained)).status_code == 200
    assert (await trained.http.post("/finish_weight_update")).status_code == 200
    assert control.weights.tensors == ["a", "b"]


async def test_the_fault_of_a_trainer_is_reported_and_the_update_is_forgotten(
    trained: Served, receiver: NotedReceiver, control: NotedControl
) -> None:
    receiver.fails = True
    refused = await init(trained, **MEETING)
    assert_error(refused, status=400, param="init_info")
    assert "there is no store of a trainer" in refused.text
    receiver.fails = False
    await init(trained, **MEETING)
    await trained.http.post("/start_weight_update")
    receiver.fails = True
    refused = await announce(trained)
    assert_error(refused, status=400, param="update_info")
    assert "the trainer has gone; the update is discarded" in refused.text
    assert_error(await trained.http.post("/finish_weight_update"), status=400, code="no_weight_update")
    assert (control.calls, open_files()) == ([], 0)
    assert (await trained.http.post("/shutdown_weight_transfer_engine")).status_code == 200
    assert not receiver.joined
