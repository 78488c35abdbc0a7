"""The bits of a row in the compiled kernels depend on its own adapter only."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.engine_info import AdapterInfo
from motet.engines.native.adapters.low_rank import AdapterRows, LowRank, ServedAdapter
from motet.engines.native.cpu.packed_adapters import PackedAdapters
from motet.engines.native.model import load_model, read_config
from motet.ids import ModelName
from tests.engines.native.cpu.test_logit_rows import BEGIN, END, NUM_ROWS, TAILS, Stage, step
from tests.kernels import kernels_of
from tests.property_settings import examples

pytestmark = pytest.mark.kernels

UNITS = [0, 2, 3, 7, 7 + END - BEGIN]
"""The first row of each tail and of the prompt, whose rows read keys of their own unit only, and the end."""
RANKS = {"q_proj": 9, "k_proj": 4, "up_proj": 16, "down_proj": 33}, {"v_proj": 64, "o_proj": 1, "gate_proj": 7}
Assignment = tuple[int | None, ...]


class AdapterStage:
    """A stage with two adapters, which change different layers."""

    def __init__(self, folder: Path, kind: str, dtype: str) -> None:
        self.stage = Stage(folder, kind, dtype)
        model = load_model(folder, read_config(folder), dtype=self.stage.storage.keys.dtype, device=torch.device("cpu"))
        maker = PackedAdapters(model, self.stage.runner.model, kernels=kernels_of(kind))
        torch.manual_seed(1)
        self.adapters = []
        for number, ranks in enumerate(RANKS):
            parts = {
                name: LowRank(
                    (torch.randn(rank, shape[1]) / 8).to(maker.dtype), torch.randn(shape[0], rank).to(maker.dtype) / 9
                )
                for name, shape in maker.linears.items()
                if (rank := ranks.get(name.split(".")[-1]))
            }
            info = AdapterInfo(name=ModelName(f"{number}"), digest=f"{number}", rank=64)
            self.adapters.append(ServedAdapter(info, maker.make(parts)))
        self.alone = {which: self.run((which,) * 4, range(NUM_ROWS)) for which in (None, 0, 1)}

    def run(self, assignment: Assignment, requested: range | list[int]) -> torch.Tensor:
        rows = [
            AdapterRows(begin, end, self.adapters[which])
            for begin, end, which in zip(UNITS, UNITS[1:], assignment, strict=False)
            if which is not None
        ]
        return self.stage.runner.run(replace(step(requested), adapters=tuple(rows))).clone()


stage = cache(AdapterStage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("avx512", "bfloat16"),
        pytest.param("avx512", "float32", marks=pytest.mark.slow),
        *(pytest.param("avx2", dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32")),
    ],
)
@examples(8)
@given(
    assignment=st.tuples(*[st.sampled_from([None, 0, 1])] * 4),
    requested=st.lists(st.integers(0, NUM_ROWS - 1), max_size=9) | st.just([*range(NUM_ROWS)]),
)
def test_rows_have_the_same_bits_next_to_rows_with_any_other_adapter(
    kind: str, dtype: str, tiny: Callable[[str], Path], assignment: Assignment, requested: list[int]
) -> None:
    here = stage(tiny("gemma3"), kind, dtype)
    assert UNITS[3] == sum(count for _, count in TAILS) and UNITS[4] == NUM_ROWS
    assert torch.equal(here.alone[None], here.stage.all), "a step without adapters is unchanged"
    assert not torch.equal(here.alone[0], here.alone[1])
    found = here.run(assignment, requested)
    for place, row in enumerate(requested):
        unit = next(number for number in range(4) if row < UNITS[number + 1])
        assert torch.equal(found[place], here.alone[assignment[unit]][row])
    here.stage.runner.verify()
