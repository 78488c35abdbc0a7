"""Random steps of running groups, cut into items and stored in the layout for the device."""

import torch
from hypothesis import strategies as st

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.cuda.launch import CudaStep, Operators, StepScratch, views
from motet.engines.native.cuda.work import WIDE, Geometry, Sections, bucket_lengths, fill, max_parts, places, plan_work
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import LayerAttention
from motet.engines.native.step.step_plan import TailChunk
from tests.engines.native.attention.attention_scene import BLOCK_SIZE, AttentionScene, MakeStep, Rule, Shape

LENGTHS = st.integers(1, 90) | st.sampled_from([300])
"""Numbers of prompt tokens."""
RULES = [Rule(), Rule(window=5), Rule(window=70), Rule(softcap=2.0), Rule(window=24, softcap=2.0)]


def steps_with(
    operators: Operators,
    shape: Shape,
    *,
    multiprocessors: int = 4,
    widest: int = WIDE,
    bucket: int | None = None,
    shared: bool = True,
) -> MakeStep:
    """Runs a scene's attention with `operators`; with `bucket`, in the memory layout of a graph for this number of
    rows."""
    geometry = Geometry(
        shape.num_heads, shape.num_kv_heads, multiprocessors, BLOCK_SIZE, widest=widest, share_trunks=shared
    )

    def make(inputs: StepInputs, storage: KVStorage) -> LayerAttention:
        work, rows = plan_work(inputs, geometry).ints, len(inputs.token_ids)
        lengths = Sections(*map(len, work))  # a scene's batch is padded
        lengths = lengths._replace(token_ids=rows, positions=rows, slots=rows, first_part=rows + 1)
        if bucket is not None:
            needed, lengths = lengths, bucket_lengths(bucket, geometry, tables=4 * lengths.tables)
            assert all(capacity >= length for capacity, length in zip(lengths, needed, strict=True))
        memory = torch.full((places(lengths).tables.stop,), 2**30, dtype=torch.int32)  # no valid index, unless filled
        filled = torch.from_numpy(fill(work, lengths))
        memory[: len(filled)] = filled
        device = storage.keys.device
        scratch = StepScratch.empty(lengths.slots, max_parts(lengths, geometry), storage=storage, geometry=geometry)
        step = CudaStep(views(memory.to(device), lengths), scratch, storage, geometry)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
        ) -> torch.Tensor:
            """Rotates queries and keys by 0, because a scene's queries and keys are already rotated."""
            projected = torch.cat([x[0].transpose(0, 1) for x in (query, key, value)], dim=1).flatten(1)
            ones = torch.ones(*query.shape[2:], dtype=query.dtype, device=query.device)
            rotated = operators.rotate(layer, projected, cos_sin=(ones, torch.zeros_like(ones)), norms=None, step=step)
            return operators.attend(layer, rotated, step=step, scores=scores).unsqueeze(0)

        return attend

    return make


@st.composite
def decoding(draw: st.DrawFn, scene: AttentionScene) -> list[TailChunk]:
    """Draws up to three groups of up to forty choices, some of which replay. Each prompt can have a common prefix with
    the previous one."""
    tails: list[TailChunk] = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 5) | st.sampled_from([17, 40]))
        num_output_tokens = [draw(st.integers(0, 20) | st.sampled_from([63, 64, 130])) for _ in range(min(count, 4))]
        rows = draw(st.sampled_from([1, 1, 1, 3, 9]))
        ends = [(begin, begin + (rows if i == 1 else 1)) for i, begin in enumerate(num_output_tokens)] + [(3, 4)] * (
            count - 4
        )
        length = draw(st.integers(1, 90) | st.sampled_from([256, 530, 800]))
        stem = tails[-1].sequence.group if tails else None
        common = draw(st.just(0) | st.integers(0, min(length, len(stem.prompt)) // BLOCK_SIZE)) if stem else 0
        tails += scene.decoding(length, ends, fragmented=draw(st.booleans()), stem=stem, common=common)
    return tails
