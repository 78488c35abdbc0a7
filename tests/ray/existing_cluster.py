"""A cluster that exists before the cells that join it: `tests.ray.nodes` in a separate process."""

import asyncio
import shutil
import subprocess
import sys
from dataclasses import dataclass

from bench.servers.ports import free_port
from motet.settings.server_config import environment
from tests.ray.engines import Engines
from tests.ray.fork_hook import environ_of
from tests.ray.joined_cluster import SECOND, Joined
from tests.ray.processes import descendants, end
from tests.ray.running_ray import NICENESS, temporary_folder


@dataclass
class ExistingCluster:
    """`joined` starts the cluster when the first test joins; `end` ends it, if it was started."""

    engines: Engines
    second_node: bool = False
    """If true, it has a second node, and another application."""
    _process: asyncio.subprocess.Process | None = None
    _joined: Joined | None = None

    async def joined(self) -> Joined:
        if self._joined is None:
            self._joined = await self._start()
        return self._joined

    async def end(self) -> None:
        if self._process is None or self._joined is None:
            return
        process, joined, self._process, self._joined = self._process, self._joined, None, None
        started = descendants(process.pid)
        assert process.stdin
        process.stdin.close()
        await process.wait()
        end(started)
        await asyncio.to_thread(shutil.rmtree, joined.temporary, ignore_errors=True)

    async def _start(self) -> Joined:
        port, temporary = free_port(), temporary_folder()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.ray.nodes", str(port), *([SECOND] if self.second_node else ())),
            env={**environment(), "RAY_TMPDIR": str(temporary), **NICENESS, **environ_of(self.engines.at)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout
        address = (await self._process.stdout.readline()).decode().strip()
        return Joined(address, port, self._process.pid, temporary)
