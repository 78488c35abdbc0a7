"""A cell on Ray Serve with a gateway loses no choice when a process is killed, and Serve replaces the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from motet import weights
from motet.settings.ray_config import Ingress
from motet.weights import Delivery
from tests.error_response import assert_error
from tests.fault.answers import Answer, fetch_answer
from tests.fault.fault_requests import CHAT, COMPLETIONS, COUNTED, chat, completion
from tests.fault.oracle import Undisturbed
from tests.patience import PATIENCE_S
from tests.ray.cell_status import RayStatus
from tests.ray.processes import check_gone, engine_of, kill, lower_priority, stopped
from tests.ray.running_ray import ADMIN_KEY, CONTROLLER, RunningRay, eventually_in
from tests.ray.streaming import LONG, answer_with_fault, unfinished

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.parametrize("shared", [Ingress.GATEWAY], indirect=True, scope="session"),
]

REPLACED_S = 150.0
"""Time within which Serve detects that a process has ended, and starts a new one."""


@asynccontextmanager
async def under_load(ray: RunningRay, undisturbed: Undisturbed, name: str) -> AsyncIterator[list[Answer]]:
    """Runs a client that requests a complete answer and a stream in turn, and compares each with the undisturbed
    one."""
    bodies = [
        (COMPLETIONS, completion(f"{name} complete", n=4, max_tokens=200)),
        (CHAT, chat(f"{name} streamed", COUNTED, n=4, max_tokens=LONG)),
    ]
    end = asyncio.Event()
    answers: list[Answer] = []

    async def client() -> None:
        expected = [await undisturbed.answer(route, body) for route, body in bodies]
        while not end.is_set():
            for (route, body), undisturbed_answer in zip(bodies, expected, strict=True):
                answers.append(await fetch_answer(ray.http, route, body))
                assert answers[-1] == undisturbed_answer

    lower_priority(map(engine_of, ray.replicas("decode")))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client())
        try:
            yield answers
        finally:
            end.set()


async def test_decode_works_without_a_killed_prefill_replica_and_connects_to_the_next_one(
    ray: RunningRay, undisturbed: Undisturbed
) -> None:
    """Decode replicas stay as they are: they connect only to the new prefill replica."""
    bodies = [completion(f"prefill dies {i}", COUNTED, n=8, max_tokens=100) for i in range(4)]
    expected = [await undisturbed.answer(COMPLETIONS, body) for body in bodies]
    decode = {process.pid for process in ray.replicas("decode")}
    (prefill,) = ray.replicas("prefill")
    tasks = [asyncio.create_task(fetch_answer(ray.http, COMPLETIONS, body)) for body in bodies[1:]]
    assert await answer_with_fault(ray, COMPLETIONS, bodies[0], lambda _: kill(prefill)) == expected[0]
    assert await asyncio.gather(*tasks) == expected[1:]
    await ray.until_idle(seconds=REPLACED_S)
    assert {process.pid for process in ray.replicas("decode")} == decode
    before = await ray.totals()
    names = [f"connected again {i}" for i in range(4)]
    answers = await asyncio.gather(*(ray.http.post(CHAT, json=chat(name, n=8, max_tokens=100)) for name in names))
    assert len({answer.headers["x-motet-worker"] for answer in answers}) == 2, "one of the two got no request"
    after = await ray.totals()
    assert (after.transfers - before.transfers, after.bypasses - before.bypasses) == (4, 0)


@pytest.mark.long
async def test_a_trainers_weights_reach_all_replicas_including_one_that_starts_later(
    ray: RunningRay, undisturbed: Undisturbed, folder: Path
) -> None:
    """Tensors pass Serve's proxy; then a folder by its path, so that all replicas have the first weights again."""
    body = completion("new weights", COUNTED, n=4)
    old = await undisturbed.answer(COMPLETIONS, body)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    pushed = {name: tensors[name] * 0.5}
    push = partial(weights.push, str(ray.http.base_url), admin_key=ADMIN_KEY, way=Delivery.HTTP)
    assert await asyncio.to_thread(push, pushed, version="half") == "half"
    new = await fetch_answer(ray.http, COMPLETIONS, body)
    assert new != old
    decode = ray.replicas("decode")[0]
    kill(decode)
    await ray.until_idle(seconds=REPLACED_S)
    for i in range(4):
        assert await fetch_answer(ray.http, COMPLETIONS, body) == new
        assert await fetch_answer(ray.http, COMPLETIONS, completion(f"another {i}", n=4))
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    answer = await ray.http.post("/update_weights", json={"weight_dir": str(folder)}, headers=admin)
    assert answer.json()["weight_version"] == "2", answer.text
    assert await fetch_answer(ray.http, COMPLETIONS, body) == old


async def test_a_killed_gateway_breaks_off_its_streams_and_the_workers_free_all(
    ray: RunningRay, undisturbed: Undisturbed
) -> None:
    body = chat("gateway dies", COUNTED, n=8, max_tokens=LONG)
    (gateway,) = ray.replicas("gateway")
    workers = (await ray.status()).addresses
    async with unfinished(ray, CHAT, body) as stream:
        kill(gateway)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await stream.read_all()
        assert not stream.reader.done
    assert await fetch_answer(ray.http, CHAT, body) == await undisturbed.answer(CHAT, body)
    assert (await ray.until_idle()).addresses == workers


async def test_without_controller_and_directory_no_choice_is_lost_and_both_are_replaced(
    ray: RunningRay, undisturbed: Undisturbed
) -> None:
    """Both decode replicas are killed in turn while they generate, and their group waits for the next one. Old workers,
    and later new ones, announce themselves to the new directory."""
    async with under_load(ray, undisturbed, "headless") as answers:
        (directory,) = ray.replicas("directory")
        (prefill,) = ray.replicas("prefill")
        kill(ray.controller)
        kill(directory)
        so_far = len(answers)
        await ray.until(lambda _: len(answers) >= so_far + 3)
    await eventually_in(REPLACED_S, partial(controller_is_back, ray), lambda: "there is no controller")
    with stopped(ray.controller):  # else it would start replicas, which would be killed too
        await lose_a_decode_replica(ray, undisturbed)
        body = chat("none decodes", COUNTED, n=2, max_tokens=LONG)
        expected = await undisturbed.answer(CHAT, body)
        waits = asyncio.create_task(answer_with_fault(ray, CHAT, body, lambda _: kill_decode_replicas(ray)))
        await eventually_in(REPLACED_S, partial(is_unready, ray), lambda: "the gateway stays ready")
        refused = await ray.http.post(CHAT, json=chat("comes too late"))
    assert_error(refused, status=503, code="no_worker")
    await ray.until_idle(seconds=REPLACED_S)
    assert ray.replicas("prefill") == [prefill]
    assert ray.replicas("directory") != [directory]
    assert await waits == expected


def kill_decode_replicas(ray: RunningRay) -> None:
    for replica in ray.replicas("decode"):
        kill(replica)


async def lose_a_decode_replica(ray: RunningRay, undisturbed: Undisturbed) -> None:
    """Kills the decode replica that generates an answer, during its stream."""
    body = chat("decode dies", COUNTED, n=8, max_tokens=LONG, logprobs=True)
    expected = await undisturbed.answer(CHAT, body)
    before = await ray.status()
    replicas = {name: ray.replica_at(name) for name in names_of_decode(before)}
    engines = {name: engine_of(replica) for name, replica in replicas.items()}
    killed: list[str] = []

    def kill_replica(worker: str) -> None:
        kill(replicas[worker])
        killed.append(worker)

    assert await answer_with_fault(ray, CHAT, body, kill_replica) == expected
    after = await ray.totals()
    assert after.migrations - before.totals.migrations == 1
    assert after.choices_resumed - before.totals.choices_resumed == 8
    check_gone([engines[killed[0]]])


def names_of_decode(status: RayStatus) -> list[str]:
    """Returns the names of decode workers, as in answers."""
    return [worker.address.removeprefix("http://") for worker in status.ready("decode")]


async def controller_is_back(ray: RunningRay) -> bool:
    return bool(ray.named(CONTROLLER))


async def is_unready(ray: RunningRay) -> bool:
    return (await ray.http.get("/ready")).status_code == 503


async def test_an_update_under_load_loses_and_changes_no_answer(
    ray: RunningRay, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    old = {process.pid for name in ("prefill", "decode", "gateway") for process in ray.replicas(name)}
    async with under_load(ray, undisturbed, "updated") as answers:
        await ray.redeploy(tmp_path / "config.yaml", "--queue-timeout=50")
        so_far = len(answers)
        await ray.until(lambda _: len(answers) >= so_far + 3)
    await ray.until_idle(seconds=REPLACED_S)

    async def replaced() -> bool:
        """An old gateway can run a moment longer."""
        new = {process.pid for name in ("prefill", "decode", "gateway") for process in ray.replicas(name)}
        return len(new) == 4 and not new & old

    await eventually_in(PATIENCE_S, replaced, lambda: "some replicas were not replaced")
