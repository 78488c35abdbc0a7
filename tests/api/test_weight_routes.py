"""The routes that bring new weights: what they pass on, in one request or in pieces, and what they refuse by name."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import save

from motet.api.trainers.incoming_weights import IncomingWeights
from motet.engine import PreparedWeights
from motet.engines.http import server_client
from motet.engines.remote import EngineServer
from motet.engines.wire import PROTOCOL, PROTOCOL_HEADER, WeightVersion
from motet.models.checkpoint import Checkpoint, MemoryFile, available_bytes
from tests.api.noted_weights import BAD, GONE, NotedWeights
from tests.api.serving import Served, Serving, coded
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


async def test_an_update_passes_the_folder_and_the_version_on(trained: Served, weights: NotedWeights) -> None:
    answer = await trained.http.post("/update_weights", json={"weight_dir": "/new", "weight_version": "step 7"})
    slowest = {"worker": "decode-0", "seconds": 0.25}
    assert answer.json() == {"message": "Weights updated", "weight_version": "step 7", "slowest": slowest}
    assert weights.asked == [("/new", "step 7")]
    assert (await trained.http.get("/weight_info")).json() == {"weight_version": "step 7"}


async def test_json_needs_no_content_type(trained: Served, weights: NotedWeights) -> None:
    assert (await trained.http.post("/update_weights", content=b'{"weight_dir": "/new"}')).status_code == 200
    assert weights.asked == [("/new", None)]


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
async def test_an_update_that_cannot_be_is_refused_by_its_field(
    trained: Served, weights: NotedWeights, body: object, status: int, param: str | None
) -> None:
    refused = await trained.http.post("/update_weights", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    assert weights.asked == []


async def test_tensors_come_in_the_body_or_through_memory(trained: Served, weights: NotedWeights) -> None:
    assert (await put(trained, query="?weight_version=9")).json()["weight_version"] == "9"
    assert (weights.asked, weights.tensors) == ([("memory", "9")], ["a", "b"])
    file = MemoryFile.create(len(FILE))
    file.write(FILE, 0)
    file.seal()
    body = {"weight_file": str(file.path)}
    assert (await trained.http.post("/update_weights", json=body)).status_code == 200
    file.close()
    assert weights.asked[1:] == [("memory", None)]
    assert open_files() == 0


@pytest.mark.parametrize(
    ("file", "code"),
    [
        pytest.param(FILE[:-1], "invalid_weights", id="cut"),
        pytest.param(FILE + b"x", "invalid_weights", id="longer"),
        pytest.param(b"", "invalid_weights", id="empty"),
        pytest.param(b"\xff" * 100, "invalid_weights", id="no header"),
    ],
)
async def test_a_body_that_is_no_whole_file_is_refused_and_forgotten(
    trained: Served, weights: NotedWeights, file: bytes, code: str
) -> None:
    assert coded(await put(trained, file)) == (400, code)
    assert (weights.asked, open_files()) == ([], 0)


async def test_a_body_without_a_length_or_without_memory_for_it_is_refused(trained: Served) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield FILE

    refused = await trained.http.post("/update_weights", content=pieces(), headers=BINARY)
    assert coded(refused) == (400, "length_required")
    lines = f"content-type: application/octet-stream\r\ncontent-length: {available_bytes() * 2}"
    assert "413" in await answer_to(trained, lines)


async def answer_to(served: Served, headers: str) -> str:
    """Returns the status line of the answer to a request whose body never comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(f"POST /update_weights HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return line.decode()


async def test_a_trainer_that_dies_while_it_sends_leaves_nothing(trained: Served, weights: NotedWeights) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", trained.port)
    head = "POST /update_weights HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    writer.write(f"{head}content-length: 1000000\r\n\r\n".encode() + FILE)
    await writer.drain()
    await until(lambda: open_files() == 1)
    writer.close()
    await until(lambda: open_files() == 0)
    assert weights.asked == []


async def test_an_update_in_pieces_is_applied_when_it_is_finished(trained: Served, weights: NotedWeights) -> None:
    """As vLLM's clients send it: names first, and the tensors meanwhile on another connection."""
    http = trained.http
    assert (await http.post("/init_weight_transfer_engine", json={"init_info": {}})).status_code == 200
    assert (await http.post("/start_weight_update", json={})).json() == {"message": "Weight update started"}
    info = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[3], [2]]}
    naming = asyncio.create_task(http.post("/update_weights", json={"update_info": info}))
    assert (await put(trained, save({"a": torch.zeros(3)}))).json() == {"message": "Weights updated"}
    assert not naming.done()
    await put(trained, save({"b": torch.zeros(2)}))
    assert (await naming).json() == {"message": "Weights updated"}
    assert weights.asked == []
    finished = await http.post("/finish_weight_update", json={"weight_version": "3"})
    assert (finished.json()["message"], finished.json()["weight_version"]) == ("Weight update finished", "3")
    assert (weights.asked, weights.tensors) == ([("memory", "3")], ["a", "b"])
    assert (await http.post("/shutdown_weight_transfer_engine")).status_code == 200
    assert open_files() == 0


async def test_pieces_that_do_not_fit_are_refused_and_a_new_start_forgets_them(
    trained: Served, weights: NotedWeights
) -> None:
    http = trained.http
    assert coded(await http.post("/finish_weight_update")) == (400, "no_weight_update")
    await http.post("/start_weight_update")
    await put(trained)
    assert coded(await put(trained)) == (400, "invalid_weights")
    refused = await http.post("/update_weights", json={"weight_dir": "/new"})
    assert "is open" in refused.json()["error"]["message"]
    waiting = asyncio.create_task(http.post("/update_weights", json={"update_info": {"names": ["c"]}}))
    await until(lambda: trained.service.incoming.waiting == 1)
    await http.post("/start_weight_update")
    assert (await waiting).json()["error"]["message"].endswith("the update has ended before tensor c came.")
    assert open_files() == 0
    assert coded(await http.post("/finish_weight_update")) == (400, "invalid_weights")
    trained.service.incoming = IncomingWeights(announced_s=0)
    await http.post("/start_weight_update")
    late = await http.post("/update_weights", json={"update_info": {"names": ["c"]}})
    assert late.json()["error"]["message"] == "Invalid 'update_info': tensor c has not come within 0 s."
    await http.post("/shutdown_weight_transfer_engine")
    assert (weights.asked, open_files()) == ([], 0)


async def test_checksums_are_told_and_compared_and_a_reset_is_an_update(trained: Served, weights: NotedWeights) -> None:
    async def check(**body: object) -> httpx.Response:
        return await trained.http.post("/weight_checker", json=body)

    assert (await check(action="checksum")).json() == {"checksums": {"a": "01", "b": "02"}}
    assert (await check(action="compare", baseline={"a": "01", "b": "02"})).json() == {"match": True, "mismatches": []}
    other = await check(action="compare", baseline={"a": "03", "c": "02"})
    assert other.json() == {"match": False, "mismatches": ["a", "b", "c"]}
    assert (await check(action="compare")).json()["error"]["param"] == "baseline"
    assert (await check(action="reset")).json() == {"status": "reset"}
    assert weights.asked == [("zeros", None)]


async def test_a_version_can_be_given_another_name(trained: Served, weights: NotedWeights) -> None:
    answer = await trained.http.post("/update_weight_version", json={"new_version": "base"})
    assert answer.json() == {"success": True, "new_version": "base"}
    assert weights.version == "base"


async def test_the_routes_are_closed_without_rl_and_where_there_are_no_engines(serve: Serving) -> None:
    for rl, code in ((False, "rl_off"), (True, "no_engines_here")):
        closed = await serve(rl=rl)
        assert coded(await closed.http.post("/update_weights", json={"weight_dir": "/new"})) == (404, code)
        assert coded(await put(closed)) == (404, code)
        assert coded(await closed.http.get("/weight_info")) == (404, code)
        for path in ("/start_weight_update", "/finish_weight_update", "/shutdown_weight_transfer_engine"):
            assert coded(await closed.http.post(path)) == (404, code)
        headers = {PROTOCOL_HEADER: str(PROTOCOL)}
        body = msgspec.msgpack.encode(WeightVersion("1"))
        assert coded(await closed.http.post("/engine/weights/apply", content=body, headers=headers)) == (404, code)


async def test_a_gateway_gives_weights_in_two_steps(trained: Served, weights: NotedWeights) -> None:
    async with server_client() as client:
        await two_steps(EngineServer(trained.url, client), weights)


async def two_steps(engine_server: EngineServer, weights: NotedWeights) -> None:
    told = await engine_server.prepare_weights(Checkpoint.of(Path("/new")))
    assert told == PreparedWeights(2, 0.5, whole=True, digest="/new")
    files = [MemoryFile.create(len(save({name: torch.zeros(2)}))) for name in "ab"]
    for name, file in zip("ab", files, strict=True):
        file.write(save({name: torch.zeros(2)}), 0)
        file.seal()
    checkpoint = Checkpoint.of_memory(files)
    assert (await engine_server.prepare_weights(checkpoint)).digest == "memory"
    assert weights.tensors == ["a", "b"]
    checkpoint.close()
    await engine_server.apply_weights("5", digest="memory")
    assert weights.version == "5"
    await engine_server.name_weights("6")
    assert weights.version == "6"
    await engine_server.hold(True)
    assert weights.paused
    await engine_server.forget_prefixes(anew=True)
    await engine_server.drop_weights("memory")
    assert weights.prepared is None
    assert weights.asked == ["memory", True, "memory"]
    assert await engine_server.checksums() == {"a": "01", "b": "02"}
    assert open_files() == 0
