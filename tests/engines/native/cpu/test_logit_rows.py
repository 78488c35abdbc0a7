"""Only rows whose logits are requested pass through the complete last layer. This changes neither the bits of their
logits nor the stored keys and values."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.attention.attention_plan import AttentionPlan, PromptRead, TailReads, TrunkRead, padded_keys
from motet.engines.native.build import build_parts
from motet.engines.native.cpu.cpu_runner import CpuRunner
from motet.engines.native.cpu.packed_weights import PackedModel
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.model import load_model, read_config
from motet.engines.native.step.inputs import StepInputs
from tests.kernels import kernels_of
from tests.property_settings import examples
from tests.tiny_engine import engine_config

pytestmark = pytest.mark.kernels

TRUNK = 300
TAILS = ((0, 2), (7, 1), (20, 4))
"""The offset of each choice's first row in its tail, and its number of rows."""
BEGIN, END = 40, 330
"""The chunk of another prompt in the same step."""
NUM_ROWS = sum(rows for _, rows in TAILS) + END - BEGIN
BLOCK_SIZE = 8


def step(requested: Sequence[int]) -> StepInputs:
    """Returns a step of a group and a chunk of a prompt, in which the logits of some rows are requested."""
    free = iter(range(1000))

    def table(tokens: int) -> list[int]:
        return [next(free) for _ in range(-(-tokens // BLOCK_SIZE))]

    def slots_of(blocks: Sequence[int], begin: int, end: int) -> list[int]:
        return [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(begin, end)]

    trunk, prompt, tails = table(TRUNK), table(END), TailReads()
    slots: list[int] = []
    positions: list[int] = []
    for offset, rows in TAILS:
        own = table(offset + rows)
        tails.add(len(slots), offset, count=rows, num_keys=padded_keys(offset + rows), table=own)
        slots += slots_of(own, offset, offset + rows)
        positions += range(TRUNK + offset, TRUNK + offset + rows)
    begin = len(slots)
    read = TrunkRead(0, begin, tuple(positions), TRUNK, trunk)
    slots += slots_of(prompt, BEGIN, END)
    positions += range(BEGIN, END)
    chunk = PromptRead(begin, len(slots), BEGIN, END, prompt)
    plan = AttentionPlan(begin, (chunk,), (read,), tails.finished())
    tokens = [3 + position % 300 for position in positions]
    return StepInputs(tokens, positions, slots, [*requested], len(requested), [], [], plan)


class Stage:
    """A tiny model with the compiled kernels, which can run the step repeatedly over the same keys and values."""

    def __init__(self, folder: Path, kind: str, dtype: str) -> None:
        kernels = kernels_of(kind)
        parts = build_parts(engine_config(folder, dtype=dtype, kernels="torch", block_size=BLOCK_SIZE, kv_cache_gb=0.1))
        torch.manual_seed(5)
        for pool in (parts.storage.keys, parts.storage.values):
            pool.copy_(torch.randn(pool.shape))
        model = load_model(folder, read_config(folder), dtype=parts.storage.keys.dtype, device=torch.device("cpu"))
        packed = PackedModel(model, parts.storage, max_positions=512, kernels=kernels)
        self.storage: KVStorage = parts.storage
        self.runner = CpuRunner(packed, parts.storage, num_threads=2, kernels=kernels)
        self.all = self.run(range(NUM_ROWS))
        self.keys, self.values = parts.storage.keys.clone(), parts.storage.values.clone()

    def run(self, requested: Sequence[int]) -> torch.Tensor:
        return self.runner.run(step(requested)).clone()


stage = cache(Stage)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), list(product(("avx512", "avx2"), ("bfloat16", "float32"))))
@examples(8)
@given(requested=st.lists(st.integers(0, NUM_ROWS - 1), max_size=9) | st.just([NUM_ROWS - 1]))
def test_logits_have_the_same_bits_with_any_other_requested_rows(
    kind: str, dtype: str, tiny: Callable[[str], Path], requested: list[int]
) -> None:
    here = stage(tiny("gemma3"), kind, dtype)
    assert torch.equal(here.run(requested), here.all[requested])
    here.runner.verify()
    assert torch.equal(here.storage.keys, here.keys) and torch.equal(here.storage.values, here.values)
