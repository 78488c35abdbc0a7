"""Measures peak memory and processor time of a server on this machine, over all its processes.

The kernel keeps a high-water mark of resident memory for each process, so nothing samples memory while a request is
timed. Shared pages are in the marks of several processes, so what is counted twice at present is subtracted:

    peak  =  sum of high-water marks  -  (sum of RSS  -  sum of PSS)
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

HERE = ("127.0.0.1", "::1", "localhost")
KIB = 1024
RESETS_THE_MARK = "5"
"""See proc_pid_clear_refs(5)."""


class ServerProcesses:
    """The processes that listen at a port, and their children."""

    def __init__(self, roots: Sequence[psutil.Process]) -> None:
        self._roots = roots

    def forget_peak(self) -> None:
        """Resets the high-water marks of all processes."""
        for process in self._alive():
            with gone():
                Path(f"/proc/{process.pid}/clear_refs").write_text(RESETS_THE_MARK)

    def peak_bytes(self) -> int:
        peak = 0
        for process in self._alive():
            with gone():
                now = process.memory_full_info()
                peak += high_water_bytes(process.pid) - (now.rss - now.pss)
        return peak

    def cpu_s(self) -> float:
        """Returns the processor time spent so far."""
        spent = 0.0
        for process in self._alive():
            with gone():
                times = process.cpu_times()
                spent += times.user + times.system
        return spent

    def _alive(self) -> set[psutil.Process]:
        found = set(self._roots)
        for root in self._roots:
            with gone():
                found.update(root.children(recursive=True))
        return found


def processes_at(url: str) -> ServerProcesses | None:
    """Returns the processes of the server at a URL. Returns None if they cannot be seen: on another machine, of another
    user, or without Linux's /proc."""
    address = urlsplit(url)
    if address.hostname not in HERE or not Path("/proc/self/clear_refs").exists():
        return None
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    pids = {c.pid for c in listening if c.laddr and c.laddr.port == address.port and c.pid is not None}
    return ServerProcesses([psutil.Process(pid) for pid in sorted(pids)]) if pids else None


def high_water_bytes(pid: int) -> int:
    """Returns the most resident memory since the start of the process or the last reset; 0 for a zombie."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:"))


@contextlib.contextmanager
def gone() -> Iterator[None]:
    """Ignores errors that mean that the process has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
        yield
