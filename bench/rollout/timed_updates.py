"""Sends new weights to a server that is generating, and measures the time of each way and the pause of a stream."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file

from bench.client.stream import follow
from motet.weights import Delivery, push

PATH = "/v1/completions"
STREAMED_N = 16
STREAMED_TOKENS = 700
"""Number of tokens of a choice. The next stream starts after the last of them."""
EVENTS_AROUND = 20
"""Number of events of the stream before and after an update."""
UPDATE_TIMEOUT_S = 300.0

Tensors = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class UpdateCost:
    """The cost of one update."""

    taken_s: float
    """Time from the trainer's call until all engines have the weights."""
    silent_s: float
    """Longest time without a token of a stream with n = 16 during the update."""
    usual_s: float
    """Longest time without a token before the update."""


class CheckpointFolders:
    """Saves a checkpoint and sends its folder to the server. The server loads the last one again if an engine dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(self, server: str, tensors: Tensors, version: str) -> None:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        save_file(dict(tensors), folder / "model.safetensors")
        body = {"weight_dir": str(folder), "weight_version": version}
        httpx.post(f"{server}/update_weights", json=body, timeout=UPDATE_TIMEOUT_S).raise_for_status()


SendWeights = Callable[[str, Tensors, str], None]
"""Sends tensors and a weight version to the server at a URL."""


def update_ways(folder: Path) -> dict[str, SendWeights]:
    """Returns the ways to send new weights, by name. `folder` is for checkpoints."""
    return {
        "folder": CheckpointFolders(folder),
        "memory": lambda server, tensors, version: push_by(Delivery.MEMORY, server, tensors, version),
        "http": lambda server, tensors, version: push_by(Delivery.HTTP, server, tensors, version),
    }


def push_by(way: Delivery, server: str, tensors: Tensors, version: str) -> None:
    push(server, tensors, version=version, way=way)


async def update_while_streaming(
    client: httpx.AsyncClient, model: str, prompt: Sequence[int], send: Callable[[], None]
) -> UpdateCost:
    """Calls `send` during a stream with n = 16."""
    times: list[float] = []
    body = {
        "model": model,
        "prompt": list(prompt),
        "n": STREAMED_N,
        "max_tokens": STREAMED_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }

    async def stream() -> None:
        while True:
            await follow(client, PATH, body, lambda _: times.append(time.perf_counter()))

    streaming = asyncio.create_task(stream())
    try:
        await _events(times, EVENTS_AROUND * STREAMED_N, streaming)
        begin = time.perf_counter()
        await asyncio.to_thread(send)
        end = time.perf_counter()
        await _events(times, len(times) + EVENTS_AROUND * STREAMED_N, streaming)
    finally:
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)
    gaps = list(pairwise(times))
    during = [later - earlier for earlier, later in gaps if later > begin and earlier < end]
    before = [later - earlier for earlier, later in gaps if later <= begin]
    return UpdateCost(end - begin, max(during), max(before))


async def _events(times: list[float], number: int, streaming: "asyncio.Task[None]") -> None:
    """Waits until the stream has had this number of events. Raises the error that ended the stream."""

    while len(times) < number:
        if streaming.done():
            streaming.result()
        await asyncio.sleep(0.005)
