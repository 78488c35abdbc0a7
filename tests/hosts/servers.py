"""Servers on hosts, and clients for them on a separate host."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import httpx
import msgspec
from msgspec.structs import astuple

from motet.settings.server_config import environment
from tests.fault.answers import Answer, Body, Reader, complete_answer
from tests.forked import ForkingProcess
from tests.hosts.network import Host
from tests.patience import PATIENCE_S
from tests.status import ReportedWorker, metric_sum

T = TypeVar("T")

PATH = "/v1/completions"
OVER_TCP = {"UCX_TLS": "tcp"}
"""Without this, UCX would move KV through shared memory, since all hosts have one kernel."""
KEYS = {"MOTET_CLUSTER_KEY": "of the cluster", "MOTET_WORKER_KEY": "of-workers", "MOTET_INSECURE": "true"}
"""Keys of the servers; clients need none."""


class HostTotals(msgspec.Struct, frozen=True):
    prefills: int
    transfers: int
    transfer_bytes: int
    forks: int
    bypasses: int
    choices_resumed: int

    def __sub__(self, earlier: "HostTotals") -> "HostTotals":
        return HostTotals(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class HostStatus(msgspec.Struct, frozen=True):
    workers: list[ReportedWorker]
    totals: HostTotals

    @property
    def own(self) -> ReportedWorker:
        """Returns the engine of a server with one engine."""
        return self.workers[0]

    def worker(self, server: "Server") -> ReportedWorker:
        """Returns the worker as a gateway sees it."""
        (found,) = [worker for worker in self.workers if worker.address == server.url]
        return found


@dataclass(frozen=True)
class Server:
    host: Host
    url: str
    http: httpx.Client

    def complete(self, body: Body) -> Answer:
        return complete_answer(self.http.post(PATH, json=body))

    @contextmanager
    def streaming(self, body: Body) -> Iterator["Streaming"]:
        with self.http.stream("POST", PATH, json={**body, "stream": True}) as response:
            assert response.status_code == httpx.codes.OK
            yield Streaming(response)

    @property
    def status(self) -> HostStatus:
        return msgspec.json.decode(self.http.get("/status").content, type=HostStatus)

    def metric(self, name: str, **labels: str) -> float:
        return metric_sum(self.http.get("/metrics").text, name, **labels)

    def until(self, holds: Callable[[HostStatus], bool]) -> HostStatus:
        """Returns the first status for which `holds` is true."""
        return eventually(lambda: self.status, holds)

    def until_idle(self) -> HostStatus:
        return self.until(lambda status: status.own.idle)


@dataclass(frozen=True)
class Streaming:
    """A streamed answer."""

    response: httpx.Response
    reader: Reader = field(default_factory=Reader)

    @cached_property
    def lines(self) -> Iterator[str]:
        return self.response.iter_lines()

    def is_from(self, url: str) -> bool:
        """Returns True if the server at that URL generates the answer, or did before it moved. This header of a gateway
        is available at once, while a server with a slow engine reports no figures."""
        return url.removeprefix("http://") == self.response.headers["x-motet-worker"]

    def read_some(self, *, choices: int) -> None:
        """Reads until this number of choices have text."""
        while not sum(bool(choice.text) for choice in self.reader.answer.choices.values()) >= choices:
            self.reader.line(next(self.lines))

    def read_all(self) -> Answer:
        for line in self.lines:
            self.reader.line(line)
        return self.reader.complete()


def eventually(read: Callable[[], T], holds: Callable[[T], bool]) -> T:
    """Returns the first value for which `holds` is true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds(value := read()):
        assert time.monotonic() < deadline_s, f"last value: {value}"
        time.sleep(0.02)
    return value


@contextmanager
def serving(forking: ForkingProcess, host: Host, port: int, command: str, *arguments: str) -> Iterator[Server]:
    """Runs a server. Its clients must be on a host of the same network."""
    address = ("--host", host.address)
    environ = {**environment(), **OVER_TCP, **KEYS}
    with (
        forking.server([*arguments, *address], command=command, port=port, environ=environ, under=host.under) as child,
        httpx.Client(base_url=child.url, timeout=2 * PATIENCE_S) as http,
    ):
        yield Server(host, child.url, http)


@contextmanager
def all_serving(*starting: AbstractContextManager[Server]) -> Iterator[list[Server]]:
    """Starts all servers at the same time, since each takes seconds."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(starting)) as pool:
            started = [pool.submit(stack.enter_context, server) for server in starting]
        yield [server.result() for server in started]
