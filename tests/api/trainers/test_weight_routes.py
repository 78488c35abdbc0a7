"""The routes of new weights: what they pass on, from one request or several, and what they refuse by name."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import save

from motet import weights
from motet.api.tensor_bodies import TensorMemory
from motet.control.checkpoint_upload import CheckpointUpload
from motet.engine_orders import (
    ApplyWeights,
    Checksums,
    DropWeights,
    EngineOrder,
    ForgetPrefixes,
    Hold,
    NameWeights,
    PreparedWeights,
    PrepareWeights,
    ReadStats,
    Sleep,
    SumWeights,
    Wake,
)
from motet.engines.http import server_client
from motet.engines.remote import EngineServer
from motet.engines.wire import PROTOCOL, PROTOCOL_HEADER
from motet.models.checkpoint import Checkpoint, CheckpointKind
from motet.models.memory_file import MemoryFile
from motet.system.machine import read_memory
from motet.weights import Delivery, PushError
from tests.api.noted_control import BAD, GONE, NotedControl
from tests.api.serving import Served, Serving
from tests.error_response import assert_error
from tests.memory_files import open_files
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

BINARY = {"content-type": "application/octet-stream"}
FILE = save({"a": torch.zeros(3), "b": torch.ones(2)})


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if true():
                return
            await asyncio.sleep(0.001)


async def put(served: Served, file: bytes = FILE, query: str = "") -> httpx.Response:
    return await served.http.post(f"/update_weights{query}", content=file, headers=BINARY)


async def test_an_update_passes_the_folder_and_the_version_on(trained: Served, control: NotedControl) -> None:
    answer = await trained.http.post("/update_weights", json={"weight_dir": "/new", "weight_version": "step 7"})
    slowest = {"worker": "decode-0", "seconds": 0.25}
    assert answer.json() == {"message": "Weights updated", "weight_version": "step 7", "slowest": slowest}
    assert control.calls == [("/new", "step 7")]
    assert (await trained.http.get("/weight_info")).json() == {"weight_version": "step 7"}


async def test_json_needs_no_content_type(trained: Served, control: NotedControl) -> None:
    assert (await trained.http.post("/update_weights", content=b'{"weight_dir": "/new"}')).status_code == 200
    assert control.calls == [("/new", None)]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "weight_dir"),
        ({"weight_dir": ""}, 400, "weight_dir"),
        ({"weight_dir": 5}, 400, "weight_dir"),
        ({"weight_dir": "/new", "weight_version": ""}, 400, "weight_version"),
        ({"weight_dir": "/new", "weight_version": "x" * 201}, 400, "weight_version"),
        ({"weight_dir": "/new", "update_info": {"names": ["a"]}}, 400, "weight_dir"),
        ({"weight_dir": BAD}, 400, "weight_dir"),
        ({"weight_dir": GONE}, 503, None),
        ({"weight_file": "/etc/passwd"}, 400, "weight_file"),
        ({"weight_file": "/proc/self/fd/0"}, 400, "weight_file"),
        ({"weight_file": "/proc/1/fd/99999"}, 400, "weight_file"),
        ({"update_info": {}}, 400, "update_info.names"),
        ({"update_info": {"names": ["a"]}}, 400, None),
        ([], 400, None),
    ],
)
async def test_an_impossible_update_is_refused_by_its_field(
    trained: Served, control: NotedControl, body: object, status: int, param: str | None
) -> None:
    refused = await trained.http.post("/update_weights", json=body)
    assert_error(refused, status=status, param=param)
    assert control.calls == []


async def test_tensors_come_in_the_body_or_through_memory(trained: Served, control: NotedControl) -> None:
    assert (await put(trained, query="?weight_version=9")).json()["weight_version"] == "9"
    assert (control.calls, control.weights.tensors) == ([("memory", "9")], ["a", "b"])
    file = MemoryFile.create(len(FILE))
    file.write(FILE, 0)
    file.seal()
    body = {"weight_file": str(file.path)}
    assert (await trained.http.post("/update_weights", json=body)).status_code == 200
    file.close()
    assert control.calls[1:] == [("memory", None)]
    assert open_files() == 0


@pytest.mark.parametrize(
    ("file", "why"),
    [
        pytest.param(FILE[:-1], f"it has {len(FILE) - 1} bytes, but its header states {len(FILE)}", id="cut"),
        pytest.param(FILE + b"x", f"it has {len(FILE) + 1} bytes, but its header states {len(FILE)}", id="longer"),
        pytest.param(b"", "it is not a safetensors file (0 bytes)", id="empty"),
        pytest.param(b"\xff" * 100, "it is not a safetensors file (100 bytes)", id="no header"),
        pytest.param(
            b"\x05" + bytes(7) + b"[1,2]", "it has a broken header: Expected `object`, got `array`", id="list"
        ),
    ],
)
async def test_a_body_that_is_not_a_complete_file_is_refused_and_forgotten(
    trained: Served, control: NotedControl, file: bytes, why: str
) -> None:
    refused = await put(trained, file)
    assert_error(refused, status=400, param="body", code="invalid_weights")
    assert refused.json()["error"]["message"] == f"Invalid 'body': {why}."
    assert (control.calls, open_files()) == ([], 0)


async def test_a_body_without_a_length_or_without_memory_for_it_is_refused(trained: Served) -> None:
    async def chunked() -> AsyncIterator[bytes]:
        yield FILE

    refused = await trained.http.post("/update_weights", content=chunked(), headers=BINARY)
    assert_error(refused, status=400, code="length_required")
    lines = f"content-type: application/octet-stream\r\ncontent-length: {read_memory().available_bytes * 2}"
    assert "413" in await answer_to(trained, lines)


@pytest.mark.slow
async def test_tensors_of_several_requests_share_the_memory_of_one_checkpoint(
    trained: Served, control: NotedControl
) -> None:
    """The bug: each of three bodies that announced 400 MB got them at once, with one byte sent."""
    memory = trained.service.tensor_memory
    most = trained.service.config.max_open_body_bytes
    assert memory.limit_bytes == most, "the fake engine does not report its number of weights"
    half = f"content-type: application/octet-stream\r\ncontent-length: {most // 2}"
    writers = [await announce(trained, half) for _ in range(2)]
    await until(lambda: open_files() == 2)
    refused = await put(trained)
    assert_error(refused, status=503, code="overloaded")
    assert f"the tensors of other requests have {most} of {most} bytes" in refused.json()["error"]["message"]
    assert "retry-after" in refused.headers
    assert "413" in await answer_to(trained, half.replace(str(most // 2), str(most + 1)))
    writers.pop().close()
    await until(lambda: open_files() == 1)
    assert (await put(trained)).status_code == 200
    assert control.calls == [("memory", None)]
    writers.pop().close()
    await until(lambda: open_files() == 0)
    assert memory.held_bytes == 0


class BusyClock:
    """Time of a trainer that waits for a server. The server is free after `num_waits` waits."""

    def __init__(self, memory: TensorMemory, *, num_waits: int) -> None:
        self.now_s = 0.0
        self._memory = memory
        self._num_waits = num_waits
        memory.held_bytes = memory.limit_bytes

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self._num_waits:
            self._memory.held_bytes = 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_waits", "timeout_s"), [(3, 600.0), (700, 600.0)])
async def test_a_push_is_repeated_while_the_server_receives_other_tensors(
    trained: Served, control: NotedControl, monkeypatch: pytest.MonkeyPatch, num_waits: int, timeout_s: float
) -> None:
    """The bug: a trainer whose push met another one failed with the server's 503."""
    clock = BusyClock(trained.service.tensor_memory, num_waits=num_waits)
    monkeypatch.setattr("motet.weights.time", clock)
    server, tensors = f"http://127.0.0.1:{trained.port}", {"a": torch.zeros(3), "b": torch.ones(2)}
    push = asyncio.to_thread(weights.push, server, tensors, way=Delivery.HTTP, version="7", timeout_s=timeout_s)
    if num_waits <= timeout_s:
        assert await push == "7"
        assert (clock.now_s, control.calls) == (num_waits, [("memory", "7")])
    else:
        with pytest.raises(PushError, match=r"503: .*the tensors of other requests have"):
            await push
        assert (clock.now_s, control.calls) == (timeout_s, [])


async def test_tensors_count_until_they_are_applied_or_dropped(trained: Served, control: NotedControl) -> None:
    memory = trained.service.tensor_memory
    await trained.http.post("/start_weight_update")
    await put(trained)
    assert memory.held_bytes == len(FILE)
    await trained.http.post("/start_weight_update")
    assert memory.held_bytes == 0
    await put(trained)
    await trained.http.post("/finish_weight_update")
    assert memory.held_bytes == 0
    for _ in range(2):
        assert (await upload(trained, FILE, 0)).status_code == 204
    assert memory.held_bytes == len(FILE), "the second upload replaces the first"
    file = await memory.create(100)
    checkpoint = Checkpoint.of_memory([file])
    checkpoint.settle()
    assert memory.held_bytes == len(FILE) and file.path.exists()
    checkpoint.close()
    assert memory.held_bytes == len(FILE)
    await upload(trained, b"", 0)
    assert (memory.held_bytes, open_files()) == (0, 0)


async def announce(served: Served, headers: str) -> asyncio.StreamWriter:
    """Sends the head of a request and the first byte of its body."""
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(f"POST /update_weights HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}\r\n\r\nx".encode())
    return writer


async def answer_to(served: Served, headers: str) -> str:
    """Returns the status line of the answer to a request whose body never comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(f"POST /update_weights HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return line.decode()


async def test_a_trainer_that_dies_while_it_sends_leaves_nothing(trained: Served, control: NotedControl) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", trained.port)
    head = "POST /update_weights HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    writer.write(f"{head}content-length: 1000000\r\n\r\n".encode() + FILE)
    await writer.drain()
    await until(lambda: open_files() == 1)
    writer.close()
    await until(lambda: open_files() == 0)
    assert control.calls == []


async def test_an_update_in_several_bodies_is_applied_when_it_is_finished(
    trained: Served, control: NotedControl
) -> None:
    """vLLM's clients send names first, and then the tensors on another connection."""
    http = trained.http
    assert (await http.post("/init_weight_transfer_engine", json={"init_info": {}})).status_code == 200
    assert (await http.post("/start_weight_update", json={})).json() == {"message": "Weight update started"}
    info = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[3], [2]]}
    naming = asyncio.create_task(http.post("/update_weights", json={"update_info": info}))
    assert (await put(trained, save({"a": torch.zeros(3)}))).json() == {"message": "Weights updated"}
    assert not naming.done()
    await put(trained, save({"b": torch.zeros(2)}))
    assert (await naming).json() == {"message": "Weights updated"}
    assert control.calls == []
    finished = await http.post("/finish_weight_update", json={"weight_version": "3"})
    assert (finished.json()["message"], finished.json()["weight_version"]) == ("Weight update finished", "3")
    assert (control.calls, control.weights.tensors) == ([("memory", "3")], ["a", "b"])
    assert (await http.post("/shutdown_weight_transfer_engine")).status_code == 200
    assert open_files() == 0


async def test_bodies_that_do_not_fit_are_refused_and_a_new_start_forgets_them(
    trained: Served, control: NotedControl
) -> None:
    http = trained.http
    assert_error(await http.post("/finish_weight_update"), status=400, code="no_weight_update")
    await http.post("/start_weight_update")
    await put(trained)
    assert_error(await put(trained), status=400, code="invalid_weights")
    refused = await http.post("/update_weights", json={"weight_dir": "/new"})
    assert "is open" in refused.json()["error"]["message"]
    waiting = asyncio.create_task(http.post("/update_weights", json={"update_info": {"names": ["c"]}}))
    await until(lambda: control.upload is not None and control.upload.waiting == 1)
    await http.post("/start_weight_update")
    assert (await waiting).json()["error"]["message"].endswith("the update ended before tensor c was received.")
    assert open_files() == 0
    assert_error(await http.post("/finish_weight_update"), status=400, code="invalid_weights")
    control.upload = CheckpointUpload(announced_s=0)
    late = await http.post("/update_weights", json={"update_info": {"names": ["c"]}})
    assert late.json()["error"]["message"] == "Invalid 'update_info': tensor c was not received within 0 s."
    await http.post("/shutdown_weight_transfer_engine")
    assert (control.calls, open_files()) == ([], 0)


async def test_checksums_are_returned_and_compared_and_a_reset_is_an_update(
    trained: Served, control: NotedControl
) -> None:
    async def check(**body: object) -> httpx.Response:
        return await trained.http.post("/weight_checker", json=body)

    assert (await check(action="checksum")).json() == {"checksums": {"a": "01", "b": "02"}}
    assert (await check(action="compare", baseline={"a": "01", "b": "02"})).json() == {"match": True, "mismatches": []}
    other = await check(action="compare", baseline={"a": "03", "c": "02"})
    assert other.json() == {"match": False, "mismatches": ["a", "b", "c"]}
    assert (await check(action="compare")).json()["error"]["param"] == "baseline"
    assert (await check(action="reset")).json() == {"status": "reset"}
    assert control.calls == [("zeros", None)]


async def test_a_version_can_be_renamed(trained: Served, control: NotedControl) -> None:
    answer = await trained.http.post("/update_weight_version", json={"new_version": "base"})
    assert answer.json() == {"success": True, "new_version": "base"}
    assert control.weights.version == "base"


async def test_the_routes_are_closed_without_rl_and_without_engines(serve: Serving) -> None:
    for rl, code in ((False, "rl_off"), (True, "no_engines_here")):
        closed = await serve(rl=rl)
        assert_error(await closed.http.post("/update_weights", json={"weight_dir": "/new"}), status=404, code=code)
        assert_error(await put(closed), status=404, code=code)
        assert_error(await closed.http.get("/weight_info"), status=404, code=code)
        for path in ("/start_weight_update", "/finish_weight_update", "/shutdown_weight_transfer_engine"):
            assert_error(await closed.http.post(path), status=404, code=code)
        headers = {PROTOCOL_HEADER: str(PROTOCOL)}
        body = msgspec.msgpack.encode(ApplyWeights("1"))
        assert_error(await closed.http.post("/engine/order", content=body, headers=headers), status=404, code=code)


async def test_a_gateway_sends_weights_in_two_steps(trained: Served, control: NotedControl) -> None:
    async with server_client() as client:
        await two_steps(EngineServer(trained.url, client), control)


async def two_steps(worker: EngineServer, control: NotedControl) -> None:
    prepared = await worker.send(PrepareWeights.of(Checkpoint.of(Path("/new"))))
    assert prepared == PreparedWeights(2, 0.5, complete=True, digest="/new")
    files = [MemoryFile.create(len(save({name: torch.zeros(2)}))) for name in "ab"]
    for name, file in zip("ab", files, strict=True):
        file.write(save({name: torch.zeros(2)}), 0)
        file.seal()
    checkpoint = Checkpoint.of_memory(files)
    prepared = await worker.send(PrepareWeights.of(checkpoint))
    assert isinstance(prepared, PreparedWeights) and prepared.digest == "memory"
    assert control.weights.tensors == ["a", "b"]
    checkpoint.close()
    await worker.send(ApplyWeights("5", "memory"))
    assert control.weights.version == "5"
    await worker.send(NameWeights("6"))
    assert control.weights.version == "6"
    await worker.send(Hold(True))
    assert control.engines.paused
    await worker.send(ForgetPrefixes(recompute=True))
    await worker.send(DropWeights("memory"))
    assert control.weights.prepared is None
    assert control.calls == ["memory", True, "memory"]
    assert await worker.send(SumWeights()) == Checksums({"a": "01", "b": "02"})
    assert open_files() == 0


async def upload(served: Served, file: bytes, number: int, protocol: int = PROTOCOL) -> httpx.Response:
    headers = {**BINARY, PROTOCOL_HEADER: str(protocol)}
    return await served.http.post(f"/engine/checkpoint?file={number}", content=file, headers=headers)


async def test_the_files_of_a_checkpoint_come_in_order_and_all_before_the_order(
    trained: Served, control: NotedControl
) -> None:
    async def prepare(*paths: str) -> httpx.Response:
        body = msgspec.msgpack.encode(PrepareWeights(CheckpointKind.MEMORY, paths))
        return await trained.http.post("/engine/order", content=body, headers={PROTOCOL_HEADER: str(PROTOCOL)})

    one, two = (save({name: torch.zeros(2)}) for name in "ab")
    assert_error(await upload(trained, one, 0, PROTOCOL - 1), status=400, code="engine_protocol")
    assert_error(await upload(trained, one, 1), status=400, code="invalid_value")
    assert (await upload(trained, one, 0)).status_code == 204
    assert_error(await prepare("/proc/1/fd/1", "/proc/1/fd/2"), status=400, code="invalid_value")
    assert (await upload(trained, two, 0)).status_code == 204, "a first file replaces an earlier checkpoint"
    assert (await upload(trained, one, 1)).status_code == 204
    assert (await prepare("/proc/1/fd/1", "/proc/1/fd/2")).status_code == 200
    assert control.weights.tensors == ["b", "a"]
    assert open_files() == 0


@pytest.mark.parametrize("order", [Sleep(weights=True), Wake(), ReadStats(check=True)])
async def test_a_gateway_cannot_send_orders_that_are_for_engines_of_this_machine(
    trained: Served, control: NotedControl, order: EngineOrder
) -> None:
    headers = {PROTOCOL_HEADER: str(PROTOCOL)}
    refused = await trained.http.post("/engine/order", content=msgspec.msgpack.encode(order), headers=headers)
    assert_error(refused, status=400, code="invalid_body")
    assert control.calls == []
