"""Finds the processes of a Ray cluster that a benchmark started, their CPU times, and the address of a replica."""

import contextlib

import httpx
import psutil

from motet.errors import StartupError

PARTS = {
    "ray::ProxyActor": "proxy",
    "ray::HAProxy": "proxy",
    "haproxy": "proxy",
    "ServeReplica:motet:gateway": "gateway",
    "ServeReplica:motet:decode": "worker",
    "bench.frontend.measured_server": "worker",
    "motet.engines.native": "engine",
}
"""Parts of the system, by a text in the command line of their processes."""
REST = "rest"
VERSION_TIMEOUT_S = 2.0


def cpu_by_part(pid: int) -> dict[str, float]:
    """Returns the seconds of CPU time that a process and its children have used so far, by part."""
    spent: dict[str, float] = {}
    for process in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            part = part_of(" ".join(process.cmdline()))
            spent[part] = spent.get(part, 0.0) + times.user + times.system
    return spent


def part_of(command: str) -> str:
    return next((part for text, part in PARTS.items() if text in command), REST)


def own_url(pid: int, deployment: str) -> str:
    """Returns the URL of the server inside a deployment's replica, without Serve. Raises StartupError without a
    replica."""
    for process in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            if f":{deployment}" in process.cmdline()[0]:
                for connection in process.net_connections("tcp4"):
                    host, port = connection.laddr
                    url = f"http://{host}:{port}"
                    if connection.status == psutil.CONN_LISTEN and _is_motet(url):
                        return url
    raise StartupError(f"no replica of {deployment} listens among the children of {pid}")


def _is_motet(url: str) -> bool:
    try:
        return "version" in httpx.get(url + "/version", timeout=VERSION_TIMEOUT_S).json()
    except (httpx.HTTPError, ValueError, TypeError):
        return False


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]
