"""The processes of a cluster on this machine: tests find them, kill them, and check that none is left."""

import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.patience import PATIENCE_S
from tests.ray.engines import engines_of


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def engine_of(replica: psutil.Process) -> psutil.Process:
    """Returns the replica's engine process."""
    (engine,) = engines_of([replica])
    return engine


def lower_priority(engines: Iterable[psutil.Process]) -> None:
    """Lets these engines run only when no other process needs the cores, so that other engines start quickly."""
    for engine in engines:
        engine.nice(19)


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


def name_of(process: psutil.Process) -> str:
    return " ".join(command_of(process))


def command_of(process: psutil.Process) -> Sequence[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Stops the process while the `with` lasts."""
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


RUN_S = 0.005
"""Time in which engines generate a few tokens."""


def let_run(engines: Iterable[psutil.Process]) -> None:
    """Lets the processes run for `RUN_S`, and stops them. This process does nothing else in that time."""
    resume(engines)
    time.sleep(RUN_S)
    for engine in engines:
        with suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGSTOP)


def resume(processes: Iterable[psutil.Process]) -> None:
    """Resumes stopped processes. Processes that have ended are left out."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


def tcp_addresses(process: psutil.Process) -> set[tuple[str, int]]:
    """Returns the addresses at which the process listens."""
    try:
        found = process.net_connections(kind="tcp4")
    except psutil.NoSuchProcess:
        return set()
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def check_gone(processes: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive, f"still running: {[name_of(process) for process in alive]}"


def end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.kill()


def folders(processes: Sequence[psutil.Process]) -> list[Path]:
    """Returns the folders with the pipes of these processes' engines, without folders of earlier processes."""
    return [
        path
        for process in processes
        for path in Path(tempfile.gettempdir()).glob(f"motet-{process.pid}-*")
        if _created_s(path) > process.create_time()
    ]


def _created_s(folder: Path) -> float:
    """Returns the time at which the folder was created, or 0 if it is gone: it is removed when the engine has
    connected."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
