"""Triton's kernels against the definition and plain torch, on a GPU or in Triton's interpreter on the CPU
(`make triton`), which has no bfloat16 products."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.core import EngineCore
from motet.engines.native.cuda.launch import Activation, CudaStep, Norms, Operators, StepScratch, views
from motet.engines.native.cuda.work import NARROW, WIDE, Geometry, Sections, places
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import LayerAttention
from tests.engines.native.attention.attention_scene import BLOCK_SIZE, AttentionScene, MakeStep, Rule, Shape, reading
from tests.engines.native.cuda.cpu_runner import Repeating, cuda_parts
from tests.engines.native.cuda.plain_operators import PlainOperators
from tests.engines.native.cuda.scenes import LENGTHS, RULES, decoding, steps_with
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
"""The interpreter takes a second where a GPU takes a millisecond."""


def kernel_steps(shape: Shape, *, multiprocessors: int = 4, bucket: int | None = None) -> MakeStep:
    widest = NARROW if shape.dtype is torch.float32 else WIDE
    return steps_with(Operators(), shape, multiprocessors=multiprocessors, widest=widest, bucket=bucket)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_random_steps_equal_the_definition(shape: Shape, data: st.DataObject) -> None:
    make = kernel_steps(shape, multiprocessors=data.draw(st.sampled_from([2, 20])))
    scene = AttentionScene(shape, blocks=1200, seed=data.draw(st.integers(0, 1000)), make_step=make, device=DEVICE)
    tails, trunks = data.draw(decoding(scene)), data.draw(reading(scene, LENGTHS))
    scene.assert_step_right(tails, trunks, data.draw(st.sampled_from(RULES)))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
def test_a_group_whose_long_trunk_is_cut_into_spans_equals_the_definition(shape: Shape, rule: Rule) -> None:
    scene = AttentionScene(shape, blocks=1024, make_step=kernel_steps(shape, multiprocessors=8), device=DEVICE)
    tails = scene.decoding(1100, [(i, i + 1) for i in range(19)])
    outputs = scene.attend(tails, [], rule)
    for i in (0, 7, 18):
        scene.assert_right(tails[i], outputs[i], rule)


@pytest.mark.parametrize("window", [1, 2, 8, 20])
def test_the_trunk_has_no_weight_for_rows_whose_window_has_left_it(window: int) -> None:
    shape = Shape()
    scene = AttentionScene(shape, make_step=kernel_steps(shape), device=DEVICE)
    tails = scene.decoding(30, [(0, 1), (6, 7), (7, 8), (18, 19), (19, 22), (45, 46)])
    scene.assert_step_right(tails, [scene.reading(100, 70, 90)], Rule(window=window))


def padded(make: MakeStep, rows: int) -> MakeStep:
    """Makes attention over a bucket's rows, in which padding rows hold NaN."""

    def made(inputs: StepInputs, storage: KVStorage) -> LayerAttention:
        step = make(inputs, storage)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
        ) -> torch.Tensor:
            count = query.shape[2]
            q, k, v = (F.pad(x, (0, 0, 0, rows - count), value=torch.nan) for x in (query, key, value))
            return step(layer, q, k, v, scores)[:, :count]

        return attend

    return made


@pytest.mark.parametrize("rule", [Rule(), Rule(window=24, softcap=2.0)], ids=str)
def test_the_padding_of_a_bucket_changes_nothing(rule: Rule) -> None:
    shape, outputs = Shape(), []
    for bucket in (None, 8, 24):
        make = padded(kernel_steps(shape, bucket=bucket), bucket or 8)
        scene = AttentionScene(shape, make_step=make, device=DEVICE)
        outputs.append(scene.attend(scene.decoding(70, [(i, i + 1) for i in range(8)]), [], rule))
    for some in outputs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outputs[0], some, strict=True))


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normed_turned_and_stored_as_plain_torch_does(dtype: torch.dtype, normed: bool) -> None:
    """A head has 24 numbers, which is not a power of two, so the padding of a head must not count."""
    kv_heads, head_dim, rows = 2, 24, 5
    projected = random((rows, 10 * head_dim), dtype, seed=1)
    cos_sin = (random((rows, head_dim), dtype, seed=2), random((rows, head_dim), dtype, seed=3))
    norms = Norms(random((head_dim,), seed=4), random((head_dim,), seed=5), 1e-6) if normed else None
    found = []
    for operators in (Operators(), PlainOperators()):
        step = storing([9, 0, 17, 3, -1], heads=6, storage=storage_of(kv_heads, head_dim, dtype))
        query = operators.rotate(0, projected, cos_sin=cos_sin, norms=norms, step=step)
        found.append((query, step.storage.keys, step.storage.values))
    tolerance = ROUNDING[dtype]
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[0][2], found[1][2]), "values are not touched"
    assert int((found[0][1][0].abs().sum(-1) > 0).sum()) == 4 * kv_heads, "the padding row is not stored"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_that_are_not_finite_are_mended_and_their_rows_flagged(dtype: torch.dtype) -> None:
    head_dim, rows = 24, 6
    projected = random((rows, 9, head_dim), dtype, seed=1)
    projected[1, 5, 5], projected[2, 3, 0] = torch.nan, -torch.inf  # keys
    projected[3, 7, 23], projected[4, 6, 1], projected[5] = torch.inf, torch.nan, torch.nan  # values; a padding row
    cos_sin = (random((rows, head_dim), dtype, seed=2), random((rows, head_dim), dtype, seed=3))
    stored = []
    for operators in (Operators(), PlainOperators()):
        step = storing([9, 0, 17, 3, 4, -1], heads=3, storage=storage_of(3, head_dim, dtype))
        operators.rotate(0, projected.flatten(1), cos_sin=cos_sin, norms=None, step=step)
        assert step.scratch.non_finite.tolist() == [0] * 6, "only the last layer flags rows"
        operators.rotate(1, projected.flatten(1), cos_sin=cos_sin, norms=None, step=step)
        assert step.scratch.non_finite.tolist() == [0, 0, 0, 1, 1, 0], "the padding row is not flagged"
        stored.append(torch.stack([step.storage.keys, step.storage.values]))
    assert stored[0].isfinite().all()
    torch.testing.assert_close(stored[0], stored[1], atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@pytest.mark.parametrize("width", [16, 24, 576, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_gates_equal_those_of_plain_torch(dtype: torch.dtype, width: int) -> None:
    x, weight = random((3, 2 * width), dtype, seed=1), random((2 * width,), seed=2)
    ours, plain, tolerance = Operators(), PlainOperators(), ROUNDING[dtype]
    for one, other in (
        (ours.norm(x, weight, epsilon=1e-5), plain.norm(x, weight, epsilon=1e-5)),
        *((ours.gate(x, activation), plain.gate(x, activation)) for activation in Activation),
    ):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def storage_of(kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVStorage:
    return KVStorage(KVLayout(2, BLOCK_SIZE, kv_heads, head_dim, dtype), 4, device=torch.device(DEVICE))


def storing(slots: list[int], *, heads: int, storage: KVStorage) -> CudaStep:
    """Returns a step that only stores rows."""
    rows = len(slots)
    lengths = Sections(rows, rows, rows, 0, rows + 1, 0, 0, 0, 0)
    ints = views(torch.zeros(places(lengths).tables.stop, dtype=torch.int32, device=DEVICE), lengths)
    ints.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    geometry = Geometry(heads, storage.keys.shape[2], 1, BLOCK_SIZE)
    return CudaStep(ints, StepScratch.empty(rows, 0, storage=storage, geometry=geometry), storage, geometry)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, tests/gpu runs engines there")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_engine_generates_the_same_with_kernels_as_without(family: str, tiny: Callable[[str], Path]) -> None:
    requests = [group("a", prompt_of(33, 3), n=5, max_tokens=5), group("b", prompt_of(20, 4), max_tokens=5)]
    written = []
    for operators in (Operators(), PlainOperators()):
        parts = cuda_parts(tiny(family), recorder=Repeating(), operators=operators, max_rows=8)
        outcomes = run(EngineCore(parts.info, parts.runner, options=parts.options), requests)
        written.append({name: outcome.tokens for name, outcome in outcomes.items()})
    assert written[0] == written[1]
