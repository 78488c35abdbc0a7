"""The exponent of a cost's growth is found, and a cost that grows faster than the work misses its target."""

import json
from pathlib import Path

import pytest

from bench.client.load import Timing
from bench.scale.__main__ import main
from bench.scale.growth import CHOICE_COSTS, GROUP_COSTS, WorkPoint, WorkSeries, growth

WORKS = (1, 2, 4, 8)


def point(work: int, total_s: float, *, peak_mib: float | None = None) -> WorkPoint:
    """Returns a run in which each of `work` choices has its first token after a second, and then 10 more."""
    return WorkPoint(work, 11, Timing(1.0, 1.0, total_s, work * 11), peak_mib)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_is_found_between_neighbouring_rows_and_over_all_rows(power: float) -> None:
    found = growth("time", WORKS, [3.0 * work**power for work in WORKS])
    assert found.exponents == pytest.approx([power] * 3)
    assert found.fit == pytest.approx(power)
    assert found.worst == pytest.approx(power)


def test_one_steep_row_is_found_among_the_others() -> None:
    found = growth("time", WORKS, [1.0, 1.0, 1.0, 4.0])
    assert found.exponents == pytest.approx([0.0, 0.0, 2.0])
    assert found.worst == pytest.approx(2.0)
    assert found.fit < 1


def test_a_cost_that_grows_like_the_work_meets_its_target_and_a_faster_one_misses_it() -> None:
    fair = WorkSeries("choices", CHOICE_COSTS, [point(work, 1.0 + work) for work in WORKS])
    assert [target.met for target in fair.targets()] == [True, True, True]  # a step, the total, the first token
    greedy = WorkSeries("choices", CHOICE_COSTS, [point(work, 1.0 + work**2) for work in WORKS])
    assert [target.met for target in greedy.targets()] == [False, False, True]


def test_memory_has_a_target_only_if_every_row_measured_it() -> None:
    points = [point(work, 2.0, peak_mib=100.0 * work**2) for work in WORKS]
    assert [g.cost for g in WorkSeries("groups", GROUP_COSTS, points).growths()] == ["total", "peak memory"]
    assert [target.met for target in WorkSeries("groups", GROUP_COSTS, points).targets()] == [True, False]
    blind = [*points[:-1], point(8, 2.0)]
    assert [g.cost for g in WorkSeries("groups", GROUP_COSTS, blind).growths()] == ["total"]


def test_a_single_row_has_no_growth() -> None:
    assert WorkSeries("choices", CHOICE_COSTS, [point(1, 2.0)]).targets() == []


def test_a_step_is_one_more_token_of_every_choice() -> None:
    assert point(4, 2.0).step_ms == pytest.approx(100.0)
    assert point(4, 2.2).ms_per_token == pytest.approx(50.0)


@pytest.mark.slow
def test_a_run_prints_json_and_draws_plots(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--ns", "1,3", "--groups", "1,2", "--choices-of-a-group", "2", "--repeats", "2", "--max-tokens", "6"]
    lengths = ["--prompt-tokens", "40", "--group-prompt-tokens", "20", "--settle", "0"]
    assert main(["--url", url, *small, *lengths, "--plot", str(tmp_path / "out")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    choices, groups = report["series"]
    assert [(p["work"], p["timing"]["tokens"]) for p in choices["points"]] == [(1, 6), (3, 18)]
    assert [(p["work"], p["timing"]["tokens"]) for p in groups["points"]] == [(1, 12), (2, 24)]
    assert {"command", "load", "load average"} <= report["machine"].keys()
    for picture in ("scale-choices.png", "scale-groups.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
