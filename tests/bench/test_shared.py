"""The benchmark of requests that share a prompt: it asks for what it says, and its floors can be missed."""

import json

import pytest

from bench.load import Timing
from bench.shared import floors, main, rows_of


def timing(last_first_s: float, total_s: float) -> Timing:
    return Timing(first_s=last_first_s, last_first_s=last_first_s, total_s=total_s, tokens=640)


def test_a_run_compares_every_case_with_a_group_of_as_many(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-tokens", "40", "--question-tokens", "8", "--max-tokens", "4"]
    assert main(["--url", url, "--before", url, "--ns", "3", "--repeats", "1", *lengths]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    cases = ["different", "few-shot", "group", "separate"]
    assert [(r["server"], r["case"]) for r in report["rows"]] == [(s, c) for s in ("before", "motet") for c in cases]
    assert [r["share"] for r in report["rows"] if r["case"] == "group"] == [1.0, 1.0]


def test_each_floor_is_met_at_its_limit_and_missed_beyond() -> None:
    met = floors(rows_of({("motet", "group"): [timing(1.0, 9.0)], ("motet", "separate"): [timing(1.2, 9.99)]}, 32))
    assert [floor.met for floor in met] == [True, True]
    missed = floors(rows_of({("motet", "group"): [timing(1.0, 9.0)], ("motet", "separate"): [timing(1.3, 10.1)]}, 32))
    assert [floor.met for floor in missed] == [False, False]
