"""Samples the resources of a server at one moment, from outside, and computes how they grow over time.

API process       resident memory, open files, threads, children (zombies too), tasks of asyncio
spared engine     the same for an engine that lives as long as the server
sender            the same for the process that sends traces
other engines     only the sum of their memory: they are killed, and start again with little memory
this machine      temporary files, shared memory
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.servers.processes import ignore_ended
from motet.tracing.sender import PROGRAM

MB = 1e6
SHARED_MEMORY = Path("/dev/shm")
SYSTEM_V = Path("/proc/sysvipc/shm")
TORCH_CACHE = "torchinductor_"
"""Name of an empty folder that torch makes for each user, and keeps."""
CREATOR = 4
"""Column of SYSTEM_V with the id of the process that made the segment."""


@dataclass(frozen=True)
class HeldResources:
    """Resources of one process."""

    rss_mb: float
    files: int
    threads: int
    children: int


@dataclass(frozen=True)
class ServerSample:
    """Resources of the server at one moment without clients."""

    minute: float
    sent: int
    """Number of acts of clients until then."""
    api: HeldResources
    spared: HeldResources
    sender: HeldResources
    tasks: int
    """Number of tasks in the event loop of the API process."""
    engines_mb: float
    """Resident memory of all engine processes."""
    temporary: int
    """Number of files and folders in the server's folder for temporary files."""
    shared: int
    """Number of pieces of shared memory."""
    left: Mapping[str, int]
    """Sums over all engines of the figures that must be 0, by name in `/status`."""


def held_by(pid: int) -> HeldResources:
    process = psutil.Process(pid)
    with process.oneshot():
        rss_mb = process.memory_info().rss / MB
        return HeldResources(rss_mb, process.num_fds(), process.num_threads(), len(process.children()))


class ServerWatcher:
    """Observes a server from outside."""

    def __init__(self, pid: int, temporary: Path, *, spared: str) -> None:
        """`temporary` is the server's folder for temporary files; `spared` is the id of the spared engine."""
        self._pid = pid
        self._temporary = temporary
        self._spared = spared
        self._pids = {pid}
        """All processes of the server so far."""
        self._shared_before = set(os.listdir(SHARED_MEMORY))

    def sample(
        self,
        workers: Sequence[Mapping[str, object]],
        *,
        tasks: int,
        minute: float,
        sent: int,
        left: Mapping[str, int],
    ) -> ServerSample:
        """Samples the server now. `workers` come from its `/status`, `tasks` from its metrics."""
        pids = {str(worker["id"]): pid for worker in workers if isinstance(pid := worker["pid"], int)}
        self._pids |= set(pids.values())
        return ServerSample(
            minute=minute,
            sent=sent,
            api=held_by(self._pid),
            spared=held_by(pids[self._spared]),
            sender=self._sender(),
            tasks=tasks,
            engines_mb=sum(held_by(pid).rss_mb for pid in pids.values()),
            temporary=len(self.temporary()),
            shared=len(self.shared()),
            left=left,
        )

    def _sender(self) -> HeldResources:
        """Returns the resources of the process that sends traces, or zeros without such a process."""
        children = psutil.Process(self._pid).children()
        pids = [child.pid for child in children if PROGRAM in command_of(child)]
        self._pids |= set(pids)
        return held_by(pids[0]) if pids else HeldResources(0.0, 0, 0, 0)

    def temporary(self) -> list[str]:
        return sorted(name for name in os.listdir(self._temporary) if not name.startswith(TORCH_CACHE))

    def shared(self) -> list[str]:
        """Returns the files of shared memory that are newer than the server, and its segments of System V."""
        files = sorted(set(os.listdir(SHARED_MEMORY)) - self._shared_before)
        rows = [line.split() for line in SYSTEM_V.read_text().splitlines()[1:]]
        return files + [f"System V {row[0]}" for row in rows if int(row[CREATOR]) in self._pids]

    def alive(self) -> list[str]:
        """Returns the processes of the server that are still running."""
        return [f"process {pid}" for pid in sorted(self._pids) if psutil.pid_exists(pid)]

    def cpu_s(self) -> float:
        """Returns the CPU time of the server so far, including engines that have ended."""
        spent = 0.0
        root = psutil.Process(self._pid)
        for process in (root, *root.children(recursive=True)):
            with ignore_ended():
                times = process.cpu_times()
                spent += times.user + times.system + times.children_user + times.children_system
        return spent


def slope_per_hour(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns the slope of a line through points of minute and value, by least squares. None if there is no such
    line."""
    if len(points) < 2:
        return None
    middle = sum(minute for minute, _ in points) / len(points)
    spread = sum((minute - middle) ** 2 for minute, _ in points)
    mean = sum(value for _, value in points) / len(points)
    return 60 * sum((minute - middle) * (value - mean) for minute, value in points) / spread if spread else None


def command_of(process: psutil.Process) -> list[str]:
    """Returns the command line of a process; empty if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also for a zombie
        return []
