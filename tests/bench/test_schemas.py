"""The files of schemas that `bench.schemas` reads."""

import json
from pathlib import Path

import pytest

from bench.schemas import read_cases

TESTS = [{"data": 1, "valid": True}, {"data": "a", "valid": False}]


def test_files_of_the_three_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"type": "integer"}))
    (tmp_path / "b.json").write_text(json.dumps({"schema": {"type": "integer"}, "tests": TESTS}))
    (tmp_path / "c.json").write_text(json.dumps([{"description": "d", "schema": {"type": "integer"}, "tests": TESTS}]))
    cases = list(read_cases([tmp_path]))
    assert [case.schema for case in cases] == [{"type": "integer"}] * 3
    assert [(case.valid, case.invalid) for case in cases[1:]] == [([1], ["a"])] * 2


@pytest.mark.parametrize("content", ["{", "[1]", '[{"schema": {}}]', '{"schema": {}, "tests": 1}'])
def test_a_file_in_another_format_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json: not a file in one of the three formats"):
        list(read_cases([tmp_path]))


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing: there are no files"):
        list(read_cases([tmp_path / "nothing"]))
