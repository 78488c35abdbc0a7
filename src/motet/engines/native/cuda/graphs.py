"""CUDA graphs: the launches of a decode step, recorded once for each bucket of rows and replayed as one.

A decode step of a model of 32 layers is some thousand launches of a few microseconds each, and Python takes longer to
ask for one than the device to do it. A replay asks once. It does to the same addresses what was done when it was
recorded, so all that differs from step to step lies in memory of fixed place (`layout`).
"""

import gc
from collections.abc import Callable
from typing import Protocol

import torch

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records work on memory that stays where it is."""

    def record(self, work: Callable[[], None]) -> Replay:
        """What does the work again."""
        ...


class CudaGraphs:
    """All graphs share the memory of what they compute in between: only one runs at a time, and what must outlive it
    is written elsewhere."""

    def __init__(self) -> None:
        gc.collect()  # once, and not as `torch.cuda.graph` does before every recording, which takes most of its time
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Replay:
        """Does the work once before: at first use kernels are compiled and loaded and libraries take their memory,
        which a recording forbids."""
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            work()
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool)
            work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay
