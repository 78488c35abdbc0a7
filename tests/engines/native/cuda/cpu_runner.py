"""Runs the GPU's runner on the CPU: kernels are replaced by plain torch, and a replayed graph repeats its work."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from motet.engines.native.build import Parts, build_parts
from motet.engines.native.cpu.model_reader import read_structure
from motet.engines.native.cuda.cuda_runner import CudaRunner, Replay
from motet.engines.native.cuda.launch import Operators
from motet.engines.native.cuda.layers import fuse
from motet.engines.native.cuda.work import Geometry
from motet.engines.native.model import load_model, read_config
from tests.engines.native.cuda.plain_operators import PlainOperators
from tests.tiny_engine import engine_config

PLAIN = PlainOperators()
HEADS, KV_HEADS, MULTIPROCESSORS = 4, 2, 3


class Repeating:
    """A recorder that counts, and whose replays repeat the work on the same memory."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def record(self, work: Callable[[], None]) -> Replay:
        self.recorded += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def cuda_parts(
    folder: Path, *, recorder: Repeating | None, operators: Operators = PLAIN, max_rows: int = 24, **changes: object
) -> Parts:
    """Builds the parts of an engine core with a tiny model and the GPU's runner."""
    parts = build_parts(engine_config(folder, kernels="torch", **changes))
    model = load_model(folder, read_config(folder), dtype=parts.storage.keys.dtype, device=torch.device("cpu"))
    weights = fuse(model, operators, structure=read_structure(model, max_positions=1000))
    runner = CudaRunner(
        model,
        parts.storage,
        geometry=Geometry(HEADS, KV_HEADS, MULTIPROCESSORS, parts.storage.block_size),
        record=recorder.record if recorder else None,
        max_rows=max_rows,
        max_tables=4096,
    )
    return replace(parts, runner=runner, weights=parts.weights.over(weights))
