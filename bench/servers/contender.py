"""A running OpenAI-compatible server in a comparison, and the figures of two of them side by side.

All servers are asked in the same way.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import msgspec

from bench.client.load import Load, Timing, middle
from bench.fork import connected
from bench.servers.processes import ServerProcesses, processes_at
from motet.errors import EngineError

MIB = 2**20


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


@dataclass(frozen=True)
class Sample:
    timing: Timing
    peak_mib: float | None
    """Peak memory; None where the server's processes cannot be seen."""


@dataclass(frozen=True)
class Manner:
    """How every server is asked."""

    seeded: bool = False
    """True if requests have a seed."""
    settle_s: float = 0.5
    """Time of quiet before a timed request, because the threads of the server asked before spin for a while."""


@dataclass(frozen=True)
class Contender:
    name: str
    client: httpx.AsyncClient
    model: str
    version: str
    processes: ServerProcesses | None
    manner: Manner

    def load(self, max_tokens: int) -> Load:
        return Load(self.client, max_tokens, model=self.model, count_blocks=False, seeded=self.manner.seeded)

    async def timed(self, prompts: Sequence[list[int]], n: int, *, max_tokens: int, seed: int) -> Sample:
        """Sends a request with n choices for each prompt, all at once, after `settle_s` of quiet."""
        await asyncio.sleep(self.manner.settle_s)
        self.forget_peak()
        load = self.load(max_tokens)
        if len(prompts) == 1:
            timing = await load.group(prompts[0], n, seed=seed)
        else:
            timing = await load.groups(prompts, n, seed=seed)
        return Sample(timing, self.peak_mib())

    def forget_peak(self) -> None:
        if self.processes:
            self.processes.forget_peak()

    def peak_mib(self) -> float | None:
        return self.processes.peak_bytes() / MIB if self.processes else None

    async def idle_percent(self, over_s: float) -> float | None:
        """Returns the percentage of one core that the idle server takes, and that others lack while they are timed."""
        if not self.processes:
            return None
        await asyncio.sleep(self.manner.settle_s)
        before_s = self.processes.cpu_s()
        await asyncio.sleep(over_s)
        return 100 * (self.processes.cpu_s() - before_s) / over_s


@asynccontextmanager
async def contender(name: str, url: str, manner: Manner) -> AsyncIterator[Contender]:
    """Connects to the server at `url`, which may end in `/v1`."""
    root = url.rstrip("/").removesuffix("/v1")
    async with connected(root) as client:
        model, version = await model_of(client), await version_of(client)
        yield Contender(name, client, model, version, processes_at(root), manner)


async def model_of(client: httpx.AsyncClient) -> str:
    """Returns the first model that the server lists. Some servers need a model's name in each request."""
    response = await client.get("/v1/models")
    response.raise_for_status()
    models = msgspec.json.decode(response.content, type=_Models).data
    if not models:
        raise EngineError(f"{client.base_url} serves no model")
    return models[0].id


async def version_of(client: httpx.AsyncClient) -> str:
    """Returns the version at /version, which Motet and vLLM have; a question mark for other servers."""
    response = await client.get("/version")
    try:
        return msgspec.json.decode(response.content, type=_Version).version
    except msgspec.DecodeError:
        return "?"


def middle_of(samples: Sequence[Sample]) -> Sample:
    """Returns the medians of the times, and the highest peak."""
    peaks = [sample.peak_mib for sample in samples if sample.peak_mib is not None]
    return Sample(middle([sample.timing for sample in samples]), max(peaks, default=None))


Figures = Mapping[str, float | None]
"""Figures by name; None, or no entry, for one that was not measured."""


@dataclass(frozen=True)
class Versus:
    ours: Figures
    peer: Figures

    def ratio(self, name: str) -> float | None:
        """Returns our figure divided by the peer's."""
        ours, peer = self.ours.get(name), self.peer.get(name)
        return ours / peer if ours is not None and peer else None

    def text(self, name: str, digits: int) -> str:
        ours, peer = (shown(figures.get(name), digits) for figures in (self.ours, self.peer))
        return f"{ours} / {peer}"

    def record(self) -> dict[str, object]:
        return {"ours": self.ours, "peer": self.peer, "ratios": {name: self.ratio(name) for name in self.ours}}


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
