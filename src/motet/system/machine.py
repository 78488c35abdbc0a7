"""Facts about the machine: processor, cores, and memory within the limits of a container.

psutil reports the memory of the host. In a container, the system ends a process that exceeds the limit of the
container's control group, so both numbers are reduced to the smallest limit of the process's own groups:

    version 2   /sys/fs/cgroup/PATH/memory.max, memory.current and memory.stat
    version 1   /sys/fs/cgroup/memory/PATH/memory.limit_in_bytes, memory.usage_in_bytes and memory.stat

A container often sees its own group as the root, at which /proc/self/cgroup has a path that does not exist."""

import importlib
import os
import platform
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

GIB = 2**30
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class MachineMemory:
    total_bytes: int
    available_bytes: int
    """Memory that programs can take without swapping: free memory, and files that the system can drop."""


@dataclass(frozen=True)
class ProcessMemory:
    address_bytes: int
    """Size of the address space; 0 if the system does not report it (Linux without /proc)."""
    resident_bytes: int
    """Memory in use; its largest value so far on Linux without /proc."""


@dataclass(frozen=True)
class Processor:
    name: str
    instruction_sets: frozenset[str] = frozenset()
    """Names as Linux has them, such as `avx2`. Empty if the system does not report them."""


def read_memory(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> MachineMemory:
    """Returns the memory of this machine, or of this container if its limit is lower."""
    try:
        memory = psutil.virtual_memory()
        total, available = int(memory.total), int(memory.available)
    except OSError:  # Linux without /proc/meminfo; the files that the system can drop do not count as available then
        sysconf: Any = vars(os)["sysconf"]  # it does not exist on Windows, where psutil needs no /proc
        total, available = (sysconf(pages) * sysconf("SC_PAGE_SIZE") for pages in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    for limit, used in cgroup_limits(cgroups, own):
        total, available = min(total, limit), min(available, limit - used)
    return MachineMemory(total, max(0, available))


def process_memory() -> ProcessMemory:
    """Returns the memory of this process."""
    with suppress(psutil.Error, OSError):
        memory = psutil.Process().memory_info()
        return ProcessMemory(int(memory.vms), int(memory.rss))
    resource: Any = importlib.import_module("resource")  # it does not exist on Windows, where psutil needs no /proc
    return ProcessMemory(0, int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) << 10)


def cgroup_limits(cgroups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and the used memory, in bytes, of each control group of this process that has a limit. Memory
    of files that were not used recently does not count as used, because the system drops it first."""
    try:
        groups = own.read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file ")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        else:
            continue
        folder = root / path.strip("/")
        for group in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # no such group or limit; the limit is `max`
                limit, current = (int((group / name).read_text()) for name in names[:2])
                yield limit, current - _stat(group / "memory.stat", names[2])
            if group == root:
                break


def _stat(file: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name)), 0)


def resident_bytes(pid: int) -> int | None:
    """Returns the memory that a process holds now, shared memory included; None if there is no such process."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def described_end(code: int) -> str:
    """Returns how a process ended, in words. `code`: the exit code, or the negative number of the signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was ended by {name}" + (" (the system does this if memory runs out)" if name == "SIGKILL" else "")


def listener_on(port: int) -> str | None:
    """Returns the program that listens on a TCP port of this machine, with its process id; None if this user cannot
    see it, since systems show the sockets of other users only to root."""
    try:
        connections = psutil.net_connections("tcp")
        listening = (one for one in connections if one.status == psutil.CONN_LISTEN)
        pids = {one.pid for one in listening if tuple(one.laddr)[1:2] == (port,) and one.pid}
        return next((f"{psutil.Process(pid).name()} (process {pid})" for pid in sorted(pids)), None)
    except (psutil.Error, OSError):
        return None


def cores() -> int:
    """Returns the number of cores that this process is allowed to use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor(cpuinfo: Path = CPUINFO) -> Processor:
    """Returns the processor's name and its instruction sets, as far as the system reports them."""
    facts: dict[str, str] = {}
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags") or facts.get("Features", "")
    name = facts.get("model name") or platform.processor() or platform.machine() or "unknown"
    return Processor(name, frozenset(flags.split()))


def torch_environ(environ: Mapping[str, str], folder: Path | str) -> dict[str, str]:
    """Returns the environment of a process that imports torch, which creates a folder when it is imported. The default
    name of that folder depends only on the user's name, so another user of the machine could take it, and torch could
    not be imported. Here it is `folder`, which no other user can write to, unless the user has set another."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder)} | dict(environ)
