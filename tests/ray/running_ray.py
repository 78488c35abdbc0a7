"""`motet ray` as a process of its own on a cluster of its own: tests ask it over HTTP, look into it and strike it.

Everything that it starts of Ray is its child, so a test fails if anything is left when it has ended.
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
from motet.settings.server_config import environment
from motet.types import Ingress
from tests.fault.asked import CHAT, chat
from tests.patience import PATIENCE_S
from tests.ray.engines import Engines, engines_of
from tests.ray.hook import environ_of
from tests.ray.joined import Joined
from tests.ray.own_servers import OwnServers
from tests.ray.processes import check_gone, command_of, descendants, end, folders, name_of, tcp_addresses
from tests.ray.told import Status, Totals, merged
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
"""Settings as patient as in other tests, and ports that no other cluster wants."""
AS_OTHERS = {"RAY_worker_niceness": "0"}
"""Without this, Ray's processes and whatever starts in them would give way to any other program."""
API_KEY = "client-key"
ADMIN_KEY = "admin-key"
CLUSTER_KEY = "cluster-key"
LOOK_S = 0.25
"""Time between two looks."""
REPLICA = "ray::ServeReplica:"
CONTROLLER = "ray::ServeController"


class RunningRay:
    """A cell that runs while the `async with` lasts. It fails if it leaves anything behind."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        joined: Joined | None = None,
        engines: Engines | None = None,
        **settings: object,
    ) -> None:
        """`flags`: as on the command line. `settings`: beside those for tiny models. `joined`: the cluster to join,
        instead of one of its own. `engines`: forks the engines of that cluster."""
        self.joined = joined
        self.port = joined.port if joined else free_port()
        self._serves = "decode" if settings.get("ingress") == Ingress.DIRECT else ""
        """Name of the deployment whose replicas each know a part of the cell."""
        self._wanted = {role: int(str(settings.get(role, 0))) for role in ("prefill", "decode")}
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
            **AS_OTHERS,
            **(environ_of(engines.at) if engines else {}),
        }
        self.child = ChildServer(self.arguments, command="ray", port=self.port, environ=self.environ)

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
        """Removes the logs that Ray itself has left."""
        if self.joined is None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def started(self) -> list[psutil.Process]:
        """Returns all processes of its own cluster, or its replicas on one that was there, with their engines."""
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
        """`worker` is its URL, or the `host:port` that names it in answers."""
        port = int(worker.rpartition(":")[2])
        (found,) = [process for process in self.named(REPLICA) if port in {port for _, port in tcp_addresses(process)}]
        return found

    async def redeploy(self, config: Path, *changes: str) -> None:
        """Deploys what `--print-config` prints, as an operator would do it."""
        printed = await self._run("-m", "motet", "ray", *self.arguments, *changes, "--print-config")
        await asyncio.to_thread(config.write_text, printed)
        await self._run("-m", "tests.ray.driver", self.gcs_address, str(config))

    async def _run(self, *command: str) -> str:
        environ = {
            **self.environ,
            "RAY_AUTH_MODE": "token",
        }  # a cluster of one machine needs it, and so does the program that joins
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return out.decode()

    def log_of(self, replica: psutil.Process) -> str:
        """Returns what the replica and its engine have written to their logs."""
        (path,) = self.temporary.glob(f"ray/session_2*/logs/worker-*-{replica.pid}.err")
        return path.read_text()

    async def status(self) -> Status:
        """Raises httpx.HTTPError if a process that knows a part of the cell does not answer."""
        answers = [(await client.get("/status")).raise_for_status() for client in await self._tellers()]
        return merged([msgspec.json.decode(answer.content, type=Status) for answer in answers])

    async def totals(self) -> Totals:
        """What all who are there have done."""
        return (await self.until(lambda status: status.whole)).totals

    async def metric(self, name: str, **labels: str) -> float:
        texts = [(await client.get("/metrics")).text for client in await self._tellers()]
        return sum(metric_sum(text, name, **labels) for text in texts)

    async def _tellers(self) -> list[httpx.AsyncClient]:
        """Returns clients for the processes that together know all of the cell."""
        return [await self.own(replica) for replica in self.replicas(self._serves)] if self._serves else [self.http]

    async def own(self, replica: psutil.Process) -> httpx.AsyncClient:
        """Returns a client for the server of a replica that serves clients itself."""
        return await self._own.of(replica)

    async def finished(self) -> Counter[psutil.Process]:
        """Returns the number of choices that each replica that serves clients itself has written."""
        return await self._own.finished(self.replicas(self._serves))

    async def finished_since(self, before: Counter[psutil.Process], *, choices: int) -> Counter[psutil.Process]:
        """Waits until so many more are counted, a moment after clients have them, and returns who wrote them."""
        since = Counter[psutil.Process]()

        async def counted() -> bool:
            since.clear()
            since.update(await self.finished())
            since.subtract(before)
            return since.total() >= choices

        await eventually_in(PATIENCE_S, counted, lambda: f"only these: {since}")
        return +since

    async def home_of(self, session: str) -> psutil.Process:
        """Returns the replica that answers this session."""
        before = await self.finished()
        body = chat(session, max_tokens=4)
        (await self.http.post(CHAT, json=body, headers={"X-Session-ID": session})).raise_for_status()
        (home,) = await self.finished_since(before, choices=1)
        return home

    async def until_whole(self, *, seconds: float = PATIENCE_S) -> Status:
        """Waits until as many replicas are there as were asked for, and none holds anything."""
        return await self.until(lambda status: status.idle(**self._wanted), seconds=seconds)

    async def until(self, holds: Callable[[Status], bool], *, seconds: float = PATIENCE_S) -> Status:
        """Returns the first status for which `holds` is true."""
        seen: list[Status] = []

        async def look() -> bool:
            with suppress(httpx.HTTPStatusError, httpx.TransportError):
                seen[:] = [await self.status()]
                return holds(seen[0])
            return False

        await eventually_in(seconds, look, lambda: f"it stays so: {seen}")
        return seen[0]


async def eventually_in(seconds: float, holds: Callable[[], Awaitable[bool]], otherwise: Callable[[], str]) -> None:
    """Waits a moment between two questions: the processes to wait for run on the same cores, and each look costs some
    time on those."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if await holds():
                    return
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise AssertionError(otherwise()) from None


def temporary_folder() -> Path:
    """Returns a folder for Ray's sessions. It must have a short path since sockets are in it."""
    return Path(tempfile.mkdtemp(prefix="mray", dir="/tmp"))
