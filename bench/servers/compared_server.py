"""A running OpenAI-compatible server in a comparison, and the figures of two servers next to each other.

All servers get requests in the same way.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import msgspec

from bench.client.load import TimedLoad, Timing, median_timing, open_client
from bench.program.report import MISSING
from bench.servers.processes import ServerProcesses, processes_at
from motet.errors import EngineError

MIB = 2**20


class _ListedModel(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class _ReportedVersion(msgspec.Struct):
    version: str


@dataclass(frozen=True)
class TimedSample:
    timing: Timing
    peak_mib: float | None
    """Peak memory. None if the server's processes cannot be seen."""


@dataclass(frozen=True)
class RequestStyle:
    """Properties of all requests, which are the same for every server."""

    seeded: bool = False
    """True if requests have a seed."""
    settle_s: float = 0.5
    """Pause before a timed request, because the threads of the server that answered before still spin for a while."""


@dataclass(frozen=True)
class ComparedServer:
    name: str
    client: httpx.AsyncClient
    model: str
    version: str
    processes: ServerProcesses | None
    style: RequestStyle

    def load(self, max_tokens: int) -> TimedLoad:
        return TimedLoad(self.client, max_tokens, model=self.model, count_blocks=False, seeded=self.style.seeded)

    async def timed(self, prompts: Sequence[list[int]], n: int, *, max_tokens: int, seed: int) -> TimedSample:
        """Sends a request with n choices for each prompt, all at once, after a pause of `settle_s`."""
        await asyncio.sleep(self.style.settle_s)
        self.reset_peak()
        load = self.load(max_tokens)
        if len(prompts) == 1:
            timing = await load.group(prompts[0], n, seed=seed)
        else:
            timing = await load.groups(prompts, n, seed=seed)
        return TimedSample(timing, self.peak_mib())

    def reset_peak(self) -> None:
        if self.processes:
            self.processes.reset_peak()

    def peak_mib(self) -> float | None:
        return self.processes.peak_bytes() / MIB if self.processes else None

    async def idle_percent(self, over_s: float) -> float | None:
        """Returns the share of one core in percent that the idle server takes, and that a timed server then lacks."""
        if not self.processes:
            return None
        await asyncio.sleep(self.style.settle_s)
        before_s = self.processes.cpu_s()
        await asyncio.sleep(over_s)
        return 100 * (self.processes.cpu_s() - before_s) / over_s


@asynccontextmanager
async def connect_server(name: str, url: str, style: RequestStyle) -> AsyncIterator[ComparedServer]:
    """Connects to the server at `url`, which can end in `/v1`."""
    root = url.rstrip("/").removesuffix("/v1")
    async with open_client(root) as client:
        model, version = await model_of(client), await version_of(client)
        yield ComparedServer(name, client, model, version, processes_at(root), style)


async def model_of(client: httpx.AsyncClient) -> str:
    """Returns the first model that the server lists. Some servers need the name of a model in each request."""
    response = await client.get("/v1/models")
    response.raise_for_status()
    models = msgspec.json.decode(response.content, type=_ModelList).data
    if not models:
        raise EngineError(f"the server at {client.base_url} lists no model")
    return models[0].id


async def version_of(client: httpx.AsyncClient) -> str:
    """Returns the version from `/version`, which Motet and vLLM have. Returns a question mark for other servers."""
    response = await client.get("/version")
    try:
        return msgspec.json.decode(response.content, type=_ReportedVersion).version
    except msgspec.DecodeError:
        return "?"


def median_sample(samples: Sequence[TimedSample]) -> TimedSample:
    """Returns the medians of the times, and the highest peak."""
    peaks = [sample.peak_mib for sample in samples if sample.peak_mib is not None]
    return TimedSample(median_timing([sample.timing for sample in samples]), max(peaks, default=None))


FiguresByName = Mapping[str, float | None]
"""Figures by name. A figure that was not measured is None or missing."""


@dataclass(frozen=True)
class FigurePair:
    """The same figures of Motet (`ours`) and of the other server (`peer`)."""

    ours: FiguresByName
    peer: FiguresByName

    def ratio(self, name: str) -> float | None:
        """Returns Motet's figure divided by the peer's."""
        ours, peer = self.ours.get(name), self.peer.get(name)
        return ours / peer if ours is not None and peer else None

    def text(self, name: str, digits: int) -> str:
        ours, peer = (rounded(figures.get(name), digits) for figures in (self.ours, self.peer))
        return f"{ours} / {peer}"

    def record(self) -> dict[str, object]:
        return {"ours": self.ours, "peer": self.peer, "ratios": {name: self.ratio(name) for name in self.ours}}


def rounded(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"
