"""How `motet ray` ends: answers under way get their time, unless it is told twice; nothing that it started stays."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from motet.types import Ingress
from tests.fault.asked import CHAT, COUNTED, chat
from tests.fault.oracle import Undisturbed
from tests.patience import PATIENCE_S
from tests.ray.asking import LONG, streaming
from tests.ray.processes import check_gone, descendants, engine_of, folders, name_of
from tests.ray.running_ray import REPLICA, RunningRay, eventually_in
from tests.ray.their_cluster import TheirCluster

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.ray]

STARTED_S = 150.0


@pytest.mark.parametrize("shared", [Ingress.GATEWAY], indirect=True, scope="session")
async def test_a_stopped_cell_finishes_its_answer_unless_stopped_twice_and_cleans_up(
    ray: RunningRay, undisturbed: Undisturbed, taken: int
) -> None:
    """One of two answers is written by an engine that stands still, so it would use all the time that answers may have.
    The port of one side channel was taken, so all side channels take one of the next ports."""
    bodies = [chat(f"ends {i}", COUNTED, n=8, max_tokens=LONG) for i in range(2)]
    expected = await undisturbed.answer(CHAT, bodies[1])
    decode = (await ray.status()).ready("decode")
    engines = {worker.address.removeprefix("http://"): engine_of(ray.replica_at(worker.address)) for worker in decode}
    ports = {worker.transfer.port for worker in decode if worker.transfer}
    assert len(ports) == 2
    assert ports < set(range(taken + 1, taken + 10))
    processes = ray.started
    async with streaming(ray, CHAT, bodies[0]) as stuck:
        engines[stuck.worker].suspend()
        async with streaming(ray, CHAT, bodies[1]) as ends:
            assert stuck.worker != ends.worker
            os.kill(ray.child.pid, signal.SIGTERM)
            assert (await ends.read_all()).complete() == expected
        await eventually_in(PATIENCE_S / 2, partial(turns_away, ray), lambda: "it still takes requests")
        os.kill(ray.child.pid, signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await stuck.read_all()
    engines[stuck.worker].resume()  # an engine that stands still is killed after 10 s
    assert await asyncio.to_thread(ray.child.wait) == 0
    check_gone(processes)
    assert not folders(processes)
    check_one_session(ray)


def check_one_session(ray: RunningRay) -> None:
    """A question to Ray after its end would have begun another session, which nobody wanted."""
    (_,) = ray.temporary.glob("ray/session_2*")


async def turns_away(ray: RunningRay) -> bool:
    return (await ray.http.get("/health")).status_code != httpx.codes.OK


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.long)], ids=["joined", "own-cluster"])
async def test_a_signal_while_replicas_start_ends_them(own: bool, folder: Path, theirs: TheirCluster) -> None:
    """The test above ends a cluster of its own too."""
    ray = RunningRay(folder, joined=None if own else await theirs.joined(), decode=1)
    command = [sys.executable, "-m", "motet", "ray", *ray.arguments, "--port", str(ray.port)]
    starting = await asyncio.create_subprocess_exec(
        *command, env=ray.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )

    def started() -> list[psutil.Process]:
        return [*descendants(starting.pid), *(ray.named(f"{REPLICA}motet") if ray.joined else [])]

    async def starts_replicas() -> bool:
        return any(name_of(process).startswith(f"{REPLICA}motet:decode") for process in started())

    await eventually_in(STARTED_S, starts_replicas, lambda: "it starts no replica")
    processes = started()
    starting.send_signal(signal.SIGTERM)
    _, said = await starting.communicate()
    assert starting.returncode == 130, said.decode()
    check_gone(processes)
    assert not folders(processes)
    check_one_session(ray)
    ray.forget()
