"""Triton's kernels against the definition and against plain torch: on a GPU, or on the CPU in Triton's interpreter
(`make kernels`), which knows no bfloat16 products."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engines.native.attention.group import Scores
from motet.engines.native.core import EngineCore
from motet.engines.native.cuda.layout import Sizes
from motet.engines.native.cuda.step import Operators, Scratch, Step, StepTensors
from motet.engines.native.cuda.work import Geometry
from motet.engines.native.kv.storage import KVLayout, KVStorage
from tests.engines.native.attention.scene import BLOCK_SIZE, Chunk, LayerAttention, MakeStep, Rule, Scene, Shape
from tests.engines.native.cuda.cpu_runner import Again, cuda_parts
from tests.engines.native.cuda.plain_operators import PlainOperators
from tests.engines.native.cuda.scenes import RULES, TOLERANCE, decoding, reading, steps_with
from tests.engines.native.cuda.where import DEVICE, INTERPRETED, REASON, RUNS
from tests.engines.native.drive import group, prompt_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(not RUNS, reason=REASON)]

HALF = torch.float16 if INTERPRETED else torch.bfloat16
SHAPES = [
    Shape(4, 2, 16, torch.float32),
    Shape(9, 3, 64, torch.float16),
    Shape(14, 2, 64, HALF),
    Shape(3, 1, 80, HALF),
    Shape(4, 1, 96, torch.float16),
    Shape(4, 1, 128, HALF),
    Shape(20, 1, 32, HALF),
    Shape(4, 2, 256, HALF),
    Shape(2, 2, 128, torch.float32),
]
EXAMPLES = 3 if INTERPRETED else 40
"""The interpreter takes a second for what a GPU does in a millisecond."""


def triton_operators() -> Operators:
    from motet.engines.native.cuda.launch import TritonOperators  # Triton is there only where these tests run

    return TritonOperators()


def assert_right(scene: Scene, chunk: Chunk, output: torch.Tensor, rule: Rule) -> None:
    tolerance = TOLERANCE[scene.shape.dtype]
    torch.testing.assert_close(output.double(), scene.definition(chunk, rule), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_random_steps_equal_the_definition(shape: Shape, data: st.DataObject) -> None:
    make = steps_with(triton_operators(), shape, multiprocessors=data.draw(st.sampled_from([2, 20])))
    scene = Scene(shape, blocks=1200, seed=data.draw(st.integers(0, 1000)), make_step=make, device=DEVICE)
    tails, trunks = data.draw(decoding(scene)), data.draw(reading(scene))
    rule = data.draw(st.sampled_from(RULES))
    chunks: list[Chunk] = [*tails, *trunks]
    for chunk, output in zip(chunks, scene.attend(tails, trunks, rule), strict=True):
        assert_right(scene, chunk, output, rule)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
def test_a_group_over_a_long_trunk_in_several_spans(shape: Shape, rule: Rule) -> None:
    scene = Scene(shape, blocks=1024, make_step=steps_with(triton_operators(), shape, multiprocessors=8), device=DEVICE)
    tails = scene.decoding(1100, [(i, i + 1) for i in range(19)])
    outputs = scene.attend(tails, [], rule)
    for i in (0, 7, 18):
        assert_right(scene, tails[i], outputs[i], rule)


@pytest.mark.parametrize("window", [1, 2, 8, 20])
def test_rows_whose_window_leaves_the_trunk_behind(window: int) -> None:
    shape = Shape()
    scene = Scene(shape, make_step=steps_with(triton_operators(), shape), device=DEVICE)
    tails = scene.decoding(30, [(0, 1), (6, 7), (7, 8), (18, 19), (19, 22), (45, 46)])
    trunk = scene.reading(100, 70, 90)
    chunks: list[Chunk] = [*tails, trunk]
    for chunk, output in zip(chunks, scene.attend(tails, [trunk], Rule(window=window)), strict=True):
        assert_right(scene, chunk, output, Rule(window=window))


class Padded:
    """Attention over a bucket's rows: those that pad it hold NaN."""

    def __init__(self, step: LayerAttention, rows: int) -> None:
        self._step = step
        self._rows = rows

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        count = query.shape[2]
        q, k, v = (F.pad(x, (0, 0, 0, self._rows - count), value=torch.nan) for x in (query, key, value))
        return self._step.attend(layer, q, k, v, scores)[:, :count]


def padded(make: MakeStep, rows: int) -> MakeStep:
    return lambda inputs, storage: Padded(make(inputs, storage), rows)


@pytest.mark.parametrize("rule", [Rule(), Rule(window=24, softcap=2.0)], ids=str)
def test_what_pads_a_bucket_changes_nothing(rule: Rule) -> None:
    shape, outputs = Shape(), []
    for bucket in (None, 8, 24):
        make = padded(steps_with(triton_operators(), shape, bucket=bucket), bucket or 8)
        scene = Scene(shape, make_step=make, device=DEVICE)
        outputs.append(scene.attend(scene.decoding(70, [(i, i + 1) for i in range(8)]), [], rule))
    for some in outputs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outputs[0], some, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_storing_mends_what_is_not_finite_and_says_which_rows(dtype: torch.dtype) -> None:
    device = torch.device(DEVICE)
    key, value = (torch.randn(6, 3, 24, dtype=dtype, device=device) for _ in range(2))
    key[1, 2, 5], key[2, 0, 0] = torch.nan, -torch.inf
    value[3, 1, 23], value[4, 0, 1], value[5] = torch.inf, torch.nan, torch.nan
    slots = torch.tensor([9, 0, 17, 3, 4, -1], dtype=torch.int32, device=device)
    stored = []
    for operators in (triton_operators(), PlainOperators()):
        storage = KVStorage(KVLayout(2, BLOCK_SIZE, 3, 24, dtype), 4, device)
        step = storing(slots, storage, operators)
        operators.store(0, key, value, step)
        assert step.scratch.sick.tolist() == [0] * 6, "only the last layer tells"
        operators.store(1, key, value, step)
        assert step.scratch.sick.tolist() == [0, 0, 0, 1, 1, 0], "and a row that pads is nobody's"
        stored.append(torch.stack([storage.keys, storage.values]))
    assert torch.equal(*stored)


def storing(slots: torch.Tensor, storage: KVStorage, operators: Operators) -> Step:
    """A step that has rows to store and nothing else."""
    sizes = Sizes(rows=len(slots), logits=0, narrow=0, wide=0, whole=0, tables=0)
    tensors = StepTensors.over(torch.zeros(sizes.ints, dtype=torch.int32, device=slots.device), sizes)
    tensors.slots.copy_(slots)
    geometry = Geometry(3, 3, 1)
    return Step(tensors, Scratch.empty(len(slots), 0, storage, geometry), storage, geometry, operators)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, tests/gpu runs engines there")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_engine_writes_the_same_with_kernels_as_without(family: str, tiny: Callable[[str], Path]) -> None:
    requests = [group("a", prompt_of(33, 3), n=5, max_tokens=5), group("b", prompt_of(20, 4), max_tokens=5)]
    written = []
    for operators in (triton_operators(), PlainOperators()):
        parts = cuda_parts(tiny(family), recorder=Again(), operators=operators, max_rows=8)
        outcomes = run(EngineCore(parts.info, parts.runner, parts.options), requests)
        written.append({name: outcome.tokens for name, outcome in outcomes.items()})
    assert written[0] == written[1]
