"""Measures the peak memory and the CPU time of a server on this machine, over all its processes.

The kernel keeps the maximum resident memory of each process, so no thread has to sample memory while a request is
timed. Shared pages count in several processes, so the pages that are counted twice at present are subtracted:

    peak  =  sum of maximum resident memory  -  (sum of RSS  -  sum of PSS)
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
KIB = 1024
RESET_MAXIMUM = "5"
"""See proc_pid_clear_refs(5)."""


class ServerProcesses:
    """The processes that listen at a port, and their children."""

    def __init__(self, roots: Sequence[psutil.Process]) -> None:
        self._roots = roots

    def reset_peak(self) -> None:
        """Resets the maximum resident memory of all processes."""
        for process in self._alive():
            with ignore_ended():
                Path(f"/proc/{process.pid}/clear_refs").write_text(RESET_MAXIMUM)

    def peak_bytes(self) -> int:
        peak = 0
        for process in self._alive():
            with ignore_ended():
                now = process.memory_full_info()
                peak += max_resident_bytes(process.pid) - (now.rss - now.pss)
        return peak

    def cpu_s(self) -> float:
        """Returns the CPU time so far, in seconds."""
        spent = 0.0
        for process in self._alive():
            with ignore_ended():
                times = process.cpu_times()
                spent += times.user + times.system
        return spent

    def _alive(self) -> set[psutil.Process]:
        found = set(self._roots)
        for root in self._roots:
            with ignore_ended():
                found.update(root.children(recursive=True))
        return found


def processes_at(url: str) -> ServerProcesses | None:
    """Returns the processes of the server at a URL. Returns None if they cannot be seen: on another machine, as another
    user, or without Linux's /proc."""
    address = urlsplit(url)
    if address.hostname not in LOCAL_HOSTS or not Path("/proc/self/clear_refs").exists():
        return None
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    pids = {c.pid for c in listening if c.laddr and c.laddr.port == address.port and c.pid is not None}
    return ServerProcesses([psutil.Process(pid) for pid in sorted(pids)]) if pids else None


def max_resident_bytes(pid: int) -> int:
    """Returns the maximum resident memory since the start of the process or the last reset. Returns 0 for a zombie."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:"))


@contextlib.contextmanager
def ignore_ended() -> Iterator[None]:
    """Ignores errors which mean that the process has just ended. Until its parent notices, its files belong to root."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError, PermissionError):
        yield
