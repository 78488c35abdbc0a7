"""The roofline of a step: work follows from the model's sizes and the step's reads, shares follow from the limits."""

import json
from pathlib import Path

import pytest

from bench.roofline.__main__ import MachineLimits, TimesByName, main, part_of, parts_of, targets
from bench.roofline.step_parts import (
    FEW_ROWS,
    PROMPT,
    PYTHON,
    SAMPLER,
    TAIL,
    TRUNK,
    PartWork,
    reads_of,
    without_prompts,
    without_tails,
    without_trunks,
)
from motet.engines.native.attention.attention_plan import AttentionPlan, PromptRead, TailRead, TrunkRead
from tests.tiny_models import save_tiny_model

LIMITS = MachineLimits(bytes_per_s=50e9, operations_per_s=1000e9, product="ours", peak_operations_per_s=1030e9)
PLAN = AttentionPlan(
    num_tail_rows=3,
    prompts=(PromptRead(3, 73, 10, 80, [7]),),
    trunks=(TrunkRead(0, 3, (100, 101, 105), 100, [1]),),
    tails=(TailRead((0, 1), 2, (0,), 64, ([2],)), TailRead((2,), 1, (5,), 64, ([3],))),
)


def test_the_minimum_time_follows_from_the_slower_limit() -> None:
    assert LIMITS.least_s(PartWork(50e9, 1e9)) == 1.0
    assert LIMITS.least_s(PartWork(1e9, 2000e9)) == 2.0
    part = part_of("n = 1", "head", 0.004, step_s=0.010, work=PartWork(100e6, 1e9), limits=LIMITS)
    assert part.of_step == pytest.approx(0.4)
    assert [part.least_ms, part.of_limit] == pytest.approx([2.0, 0.5])
    assert [part.of_bandwidth, part.of_products] == pytest.approx([0.5, 0.25])


def test_every_key_is_read_once_and_seen_by_every_row_after_it() -> None:
    reads = list(reads_of(PLAN))
    assert reads[0] == (TRUNK, 100, 300)
    assert reads[1:3] == [(TAIL, 2, 1 + 2), (TAIL, 6, 6)]
    assert reads[3] == (PROMPT, 80, sum(range(11, 81)))


def test_plans_without_a_part_keep_their_rows() -> None:
    assert [keys for part, keys, _ in reads_of(without_trunks(PLAN)) if part == TRUNK] == [0]
    assert [keys for part, keys, _ in reads_of(without_tails(PLAN)) if part == TAIL] == [2, 1]
    few = without_prompts(PLAN).prompts
    assert [(read.begin, read.end) for read in few] == [(3, 35), (35, 67), (67, 73)]
    assert all(read.first_position == 0 and read.num_keys <= FEW_ROWS for read in few)


def test_the_median_of_each_time_counts() -> None:
    found = TimesByName()
    for times in ({"a": 2.0, "b": 1.0}, {"a": 1.5, "b": 3.0, "c": 4.0}, {"a": 9.0}):
        found.add(times)
    assert found.medians() == {"a": 2.0, "b": 2.0, "c": 4.0}


def test_an_entire_step_has_the_work_of_all_its_parts() -> None:
    times = {"head": 0.002, TRUNK: 0.001, SAMPLER: 0.001, PYTHON: 0.001, "forward": 0.008, "step": 0.01}
    works = {"head": PartWork(100e6, 1e9), TRUNK: PartWork(50e6, 3e9)}
    parts = {part.part: part for part in parts_of("n = 1", times, works, LIMITS)}
    assert [*parts] == ["head", TRUNK, SAMPLER, PYTHON, "forward", "step"]
    assert parts[SAMPLER].of_limit is None
    assert [parts["step"].gigabytes, parts["step"].gflop] == pytest.approx([0.15, 4.0])
    assert parts["step"].of_bandwidth == pytest.approx(0.15e9 / 0.01 / 50e9)
    (target,) = targets([*parts.values()])
    assert target.value == parts["step"].of_bandwidth


@pytest.mark.slow
@pytest.mark.kernels
def test_a_run_with_a_tiny_model_reports_every_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LARGE": 64, "LARGE_ROWS": 8, "TILES": 1}.items():
        monkeypatch.setattr(f"bench.roofline.__main__.{name}", value)
    monkeypatch.setattr("bench.kernels.weight_copies.CACHED_BYTES", 2**16)
    sizes = ["--ns", "1,3", "--prompt-tokens", "100", "--repeats", "1", "--threads", "1", "--kv-cache-gb", "0.05"]
    assert main(["--model", str(save_tiny_model("llama", tmp_path)), *sizes]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    shown = {(part["case"], part["part"]) for part in record["parts"]}
    assert {("prefill", PROMPT), ("n = 1", TRUNK), ("n = 3", TAIL), ("n = 3", "step")} <= shown
    assert record["limits"]["bytes_per_s"] > 0
