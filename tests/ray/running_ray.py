"""`motet ray` in a process of its own on a cluster of its own: tests send it requests, inspect it and inject faults.

All processes of Ray that it starts are its descendants, so a test fails if any of them is left when it has ended.
"""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx
import msgspec
import psutil

from bench.servers.ports import free_port
from motet.deploy.child import ChildServer
from motet.settings.ray_config import Ingress
from motet.settings.server_config import environment
from tests.fault.fault_requests import CHAT, chat
from tests.patience import PATIENCE_S
from tests.ray.cell_status import RayStatus, RayTotals, merged
from tests.ray.engines import Engines, engines_of
from tests.ray.fork_hook import environ_of
from tests.ray.joined_cluster import Joined
from tests.ray.own_servers import OwnServers
from tests.ray.processes import check_gone, command_of, descendants, end, folders, name_of, tcp_addresses
from tests.status import metric_sum

SETTINGS = {
    "served-model-name": "tiny",
    "dtype": "float32",
    "max-model-len": "512",
    "kv-cache-gb": "0.02",
    "block-size": "8",
    "max-num-seqs": "64",
    "threads": "1",
    "bypass-tokens": "0",
    "cpus-per-worker": "0.1",
    "prefill-port": "0",
    "decode-port": "0",
    "heartbeat-timeout": "60",
    "worker-timeout": "60",
    "migration-wait": "100",
    "lease": "600",
}
"""The same time limits as in other tests, and ports that no other cluster uses."""
NICENESS = {"RAY_worker_niceness": "0"}
"""Without this, Ray's processes, and engines that start in them, would have a lower priority than all other
programs."""
API_KEY = "client-key"
ADMIN_KEY = "admin-key"
CLUSTER_KEY = "cluster-key"
POLL_S = 0.25
"""Time between two checks."""
REPLICA = "ray::ServeReplica:"
CONTROLLER = "ray::ServeController"


class RunningRay:
    """A cell that runs while the `async with` lasts. The exit fails if processes or folders are left."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        joined: Joined | None = None,
        engines: Engines | None = None,
        **settings: object,
    ) -> None:
        """`flags`: as on the command line; `settings`: in addition to the settings for tiny models; `joined`: the
        cluster to join; None to start one; `engines`: forks the engines of that cluster."""
        self.joined = joined
        self.port = joined.port if joined else free_port()
        self._serves = "decode" if settings.get("ingress") == Ingress.DIRECT else ""
        """Name of the deployment whose replicas each know a part of the cell; empty if a gateway knows all of it."""
        self._expected = {role: int(str(settings.get(role, 0))) for role in ("prefill", "decode")}
        self.temporary = joined.temporary if joined else temporary_folder()
        if joined:
            settings["ray_address"] = joined.address
        named = {
            "ray-address": "local",
            **SETTINGS,
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        self.arguments = [str(folder), *(f"--{name}={value}" for name, value in named.items()), *flags]
        self.environ = {
            **environment(),
            "RAY_TMPDIR": str(self.temporary),
            "MOTET_API_KEYS": API_KEY,
            "MOTET_ADMIN_KEY": ADMIN_KEY,
            "MOTET_CLUSTER_KEY": CLUSTER_KEY,
            **NICENESS,
            **(environ_of(engines.at) if engines else {}),
        }
        self.child = ChildServer(self.arguments, command="ray", port=self.port, environ=self.environ)

    @property
    def serves_directly(self) -> bool:
        """True if decode replicas serve clients, without a gateway."""
        return bool(self._serves)

    async def __aenter__(self) -> "RunningRay":
        try:
            await asyncio.to_thread(self.child.__enter__)
        except BaseException:
            self.forget()
            raise
        headers = {"Authorization": f"Bearer {API_KEY}"}
        self.http = httpx.AsyncClient(base_url=self.child.url, timeout=2 * PATIENCE_S, headers=headers)
        self._own = OwnServers(headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.http.aclose()
        await self._own.close()
        processes = self.started
        try:
            await asyncio.to_thread(self.child.__exit__, kind, error, traceback)
            check_gone(processes)
            assert not folders(processes)
        finally:
            end(processes)
            self.forget()

    def forget(self) -> None:
        """Removes the logs that Ray does not remove."""
        if self.joined is None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def started(self) -> list[psutil.Process]:
        """Returns all processes of its own cluster, or its replicas on a joined cluster; both with their engines."""
        replicas = self.named(f"{REPLICA}motet")
        return [*descendants(self.child.pid), *(replicas if self.joined else ()), *engines_of(replicas)]

    @property
    def processes(self) -> list[psutil.Process]:
        """Returns all processes that run on the cluster."""
        return descendants(self.joined.pid if self.joined else self.child.pid)

    def named(self, beginning: str) -> list[psutil.Process]:
        return [process for process in self.processes if name_of(process).startswith(beginning)]

    def replicas(self, deployment: str, app: str = "motet") -> list[psutil.Process]:
        return [
            process
            for process in self.named(f"{REPLICA}{app}:{deployment}")
            if name_of(process).removeprefix(REPLICA).split(":")[1].split(".")[0].split(" ")[0] == deployment
        ]

    @property
    def controller(self) -> psutil.Process:
        (process,) = self.named(CONTROLLER)
        return process

    @property
    def gcs_address(self) -> str:
        """Returns the address at which a separate program can join the cluster."""
        (address,) = {
            argument.partition("=")[2]
            for process in self.processes
            for argument in command_of(process)
            if argument.startswith("--gcs-address=")
        }
        return address

    def replica_at(self, worker: str) -> psutil.Process:
        """Returns the replica of a worker, which is named by its URL, or by `host:port` as in answers."""
        port = int(worker.rpartition(":")[2])
        (found,) = [process for process in self.named(REPLICA) if port in {port for _, port in tcp_addresses(process)}]
        return found

    async def redeploy(self, config: Path, *changes: str) -> None:
        """Deploys the output of `--print-config`, as an operator does."""
        printed = await self._run("-m", "motet", "ray", *self.arguments, *changes, "--print-config")
        await asyncio.to_thread(config.write_text, printed)
        await self._run("-m", "tests.ray.driver", self.gcs_address, str(config))

    async def _run(self, *command: str) -> str:
        # A cluster of one machine requires Ray's token, also from a program that joins it.
        environ = {**self.environ, "RAY_AUTH_MODE": "token"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return out.decode()

    def log_of(self, replica: psutil.Process) -> str:
        """Returns the log of the replica and its engine."""
        (path,) = self.temporary.glob(f"ray/session_2*/logs/worker-*-{replica.pid}.err")
        return path.read_text()

    async def status(self) -> RayStatus:
        """Raises httpx.HTTPError if a process that knows a part of the cell does not answer."""
        answers = [(await client.get("/status")).raise_for_status() for client in await self._servers()]
        return merged([msgspec.json.decode(answer.content, type=RayStatus) for answer in answers])

    async def totals(self) -> RayTotals:
        """Returns the totals of all workers."""
        return (await self.until(lambda status: status.complete)).totals

    async def metric(self, name: str, **labels: str) -> float:
        texts = [(await client.get("/metrics")).text for client in await self._servers()]
        return sum(metric_sum(text, name, **labels) for text in texts)

    async def _servers(self) -> list[httpx.AsyncClient]:
        """Returns clients for the processes that together know the complete cell."""
        return [await self.own(replica) for replica in self.replicas(self._serves)] if self._serves else [self.http]

    async def own(self, replica: psutil.Process) -> httpx.AsyncClient:
        """Returns a client for the server of a replica that serves clients directly."""
        return await self._own.of(replica)

    async def finished(self) -> Counter[psutil.Process]:
        """Returns the number of choices that each replica has finished; only with direct ingress."""
        return await self._own.finished(self.replicas(self._serves))

    async def finished_since(self, before: Counter[psutil.Process], *, choices: int) -> Counter[psutil.Process]:
        """Waits until this number of further choices is counted, which is a moment after clients have received them.
        Returns the number by replica."""
        since = Counter[psutil.Process]()

        async def counted() -> bool:
            since.clear()
            since.update(await self.finished())
            since.subtract(before)
            return since.total() >= choices

        await eventually_in(PATIENCE_S, counted, lambda: f"finished: {since}")
        return +since

    async def home_of(self, session: str) -> psutil.Process:
        """Returns the replica of this session."""
        before = await self.finished()
        body = chat(session, max_tokens=4)
        (await self.http.post(CHAT, json=body, headers={"X-Session-ID": session})).raise_for_status()
        (home,) = await self.finished_since(before, choices=1)
        return home

    async def until_idle(self, *, seconds: float = PATIENCE_S) -> RayStatus:
        """Waits until all replicas of the settings are ready, and none holds blocks or groups."""
        return await self.until(lambda status: status.idle(**self._expected), seconds=seconds)

    async def until(self, holds: Callable[[RayStatus], bool], *, seconds: float = PATIENCE_S) -> RayStatus:
        """Returns the first status for which `holds` is true."""
        last: list[RayStatus] = []

        async def check() -> bool:
            with suppress(httpx.HTTPStatusError, httpx.TransportError):
                last[:] = [await self.status()]
                return holds(last[0])
            return False

        await eventually_in(seconds, check, lambda: f"last status: {last}")
        return last[0]


async def eventually_in(seconds: float, holds: Callable[[], Awaitable[bool]], otherwise: Callable[[], str]) -> None:
    """Returns when `holds()` is true. It waits a moment between two checks: the processes that it waits for run on the
    same cores, and each check costs some time on them."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if await holds():
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(otherwise()) from None


def temporary_folder() -> Path:
    """Creates a folder for Ray's sessions. Its path must be short, because sockets are in it."""
    return Path(tempfile.mkdtemp(prefix="mray", dir="/tmp"))
