"""Random steps in the middle of groups' lives, cut into work and laid out as the device gets them."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from motet.engines.native.attention.group import Scores
from motet.engines.native.cuda.layout import bucket_sizes, fill, most_parts, sizes_of
from motet.engines.native.cuda.step import Operators, Scratch, Step, StepTensors, Turns
from motet.engines.native.cuda.work import WIDE, Geometry, plan_work
from motet.engines.native.inputs import StepInputs
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.plan import TailChunk, TrunkChunk
from tests.engines.native.attention.scene import LayerAttention, MakeStep, Rule, Scene, Shape

RULES = [Rule(), Rule(window=5), Rule(window=70), Rule(softcap=2.0), Rule(window=24, softcap=2.0)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-6}


def steps_with(
    operators: Operators,
    shape: Shape,
    *,
    multiprocessors: int = 4,
    widest: int = WIDE,
    bucket: int | None = None,
    shared: bool = True,
) -> MakeStep:
    """What makes a scene's attention run on `operators`; with `bucket`, over the room of a graph for so many rows."""
    geometry = Geometry(shape.num_heads, shape.num_kv_heads, multiprocessors, widest, share_trunks=shared)

    def make(inputs: StepInputs, storage: KVStorage) -> LayerAttention:
        work = plan_work(inputs, geometry)
        needed = replace(sizes_of(inputs, work), rows=len(inputs.token_ids))  # a scene's batch is padded
        sizes = needed
        if bucket is not None:
            sizes = bucket_sizes(bucket, geometry, tables=4 * needed.tables)
            assert sizes.holds(needed)
        ints = torch.full((sizes.ints,), 2**30, dtype=torch.int32)  # what is not filled leads astray
        assert fill(ints.numpy(), inputs, work, sizes) <= sizes.ints
        device = storage.keys.device
        scratch = Scratch.empty(sizes.rows, most_parts(sizes, geometry), storage, geometry)
        return Unturned(Step(StepTensors.over(ints.to(device), sizes), scratch, storage, geometry, operators))

    return make


class Unturned:
    """A scene's layers, whose queries and keys are what they should be already: turned by nothing."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        operators, rows, head_dim = self._step.operators, query.shape[2], query.shape[3]
        projected = torch.cat([x[0].transpose(0, 1) for x in (query, key, value)], dim=1).flatten(1)
        ones = torch.ones(rows, head_dim, dtype=query.dtype, device=query.device)
        turned = operators.turn(layer, projected, Turns(ones, torch.zeros_like(ones)), None, self._step)
        return operators.attend(layer, turned, self._step, scores).unsqueeze(0)


@st.composite
def decoding(draw: st.DrawFn, scene: Scene) -> list[TailChunk]:
    """Up to three groups of up to forty choices, a few of which replay."""
    tails: list[TailChunk] = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 5) | st.sampled_from([17, 40]))
        written = [draw(st.integers(0, 20) | st.sampled_from([63, 64, 130])) for _ in range(min(count, 4))]
        rows = draw(st.sampled_from([1, 1, 1, 3, 9]))
        ends = [(begin, begin + (rows if i == 1 else 1)) for i, begin in enumerate(written)] + [(3, 4)] * (count - 4)
        tails += scene.decoding(
            draw(st.integers(1, 90) | st.sampled_from([256, 530])), ends, fragmented=draw(st.booleans())
        )
    return tails


@st.composite
def reading(draw: st.DrawFn, scene: Scene) -> list[TrunkChunk]:
    """Up to two prompts in the middle."""
    trunks = []
    for _ in range(draw(st.integers(0, 2))):
        length = draw(st.integers(1, 90) | st.sampled_from([300]))
        begin = draw(st.integers(0, length - 1))
        trunks.append(
            scene.reading(length, begin, draw(st.integers(begin + 1, length)), fragmented=draw(st.booleans()))
        )
    return trunks
