"""The benchmark of forks: its figures are consistent, and its targets can be missed."""

import json

import pytest

from bench.client.load import Timing, median_timing
from bench.fork import ForkRow, main, targets
from bench.program.command_line import numbers
from motet.deploy.child import CounterSnapshot, figures_in

NOTHING = CounterSnapshot(**dict.fromkeys(CounterSnapshot.__dataclass_fields__, 0))


def timing(last_first_s: float, total_s: float) -> Timing:
    return Timing(first_s=last_first_s, last_first_s=last_first_s, total_s=total_s, tokens=64)


def row(n: int, last_first_s: float, total_s: float, *, separate_s: float) -> ForkRow:
    return ForkRow(n, timing(last_first_s, total_s), NOTHING, timing(last_first_s, separate_s))


@pytest.mark.slow
def test_a_run_prints_json_on_the_last_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", url, "--separate-url", url, "--ns", "1,3", "--separate-ns", "3", "--repeats", "2"]
    assert main([*arguments, "--prompt-tokens", "40", "--max-tokens", "5"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["n"], r["group"]["tokens"]) for r in report["rows"]] == [(1, 5), (3, 15)]
    assert [r["spent"]["prompt_tokens"] for r in report["rows"]] == [40, 40]
    assert [r["separate"] is None for r in report["rows"]] == [True, False]
    assert {"cpu", "torch", "motet", "command"} <= report["machine"].keys()


def test_each_target_is_met_at_its_limit_and_missed_beyond() -> None:
    met = targets([row(1, 1.0, 3.0, separate_s=3.0), row(32, 1.3, 12.0, separate_s=24.0)])
    assert [target.met for target in met] == [True, True, True]
    missed = targets([row(1, 1.0, 3.0, separate_s=3.0), row(32, 1.31, 12.1, separate_s=24.1)])
    assert [target.met for target in missed] == [False, False, False]


def test_medians_are_taken_figure_by_figure() -> None:
    timings = [Timing(1, 5, 9, 64, 7), Timing(2, 4, 8, 64, 6), Timing(3, 6, 7, 64, 5)]
    assert median_timing(timings) == Timing(2, 5, 8, 64, 7)
    assert median_timing(timings).decode_tokens_per_s == 64 / 3


def test_counters_are_read_from_the_exposition() -> None:
    names = list(CounterSnapshot.__dataclass_fields__)
    exposition = "".join(
        f'# TYPE motet:{n} counter\nmotet:{n}_total{{model_name="m"}} {i}.0\n' for i, n in enumerate(names)
    )
    later = figures_in(exposition)
    assert [getattr(later, name) for name in names] == list(range(len(names)))
    assert later - later == NOTHING


def test_a_list_of_numbers_can_be_empty() -> None:
    assert (numbers("1,8,32"), numbers("")) == ((1, 8, 32), ())
