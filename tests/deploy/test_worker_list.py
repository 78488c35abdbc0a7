"""Lists of workers: the parsing of a workers' file, and the workers that a changed list adds and removes."""

import logging
import os
from pathlib import Path

import pytest

from motet.deploy.worker_list import WorkersFile, WorkersFromList
from motet.settings.named_worker import NamedWorker
from motet.types import Role

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def test_lines_name_workers_with_a_role_or_without(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text(f"# the first\n{A}/v1/,prefill\n\n  {B} , decode # the second\n{A}\n")
    assert WorkersFile(file).named == (NamedWorker(A, Role.PREFILL), NamedWorker(B, Role.DECODE))


def test_a_malformed_line_is_logged_and_the_others_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "workers"
    file.write_text(f"{A}\nhalf a lin\ndecode\n{B},cook\n{B}\n")
    with caplog.at_level(logging.ERROR):
        read = WorkersFile(file)
        assert {worker.url for worker in read.check()} == {A, B}
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [2, 3, 4]


def test_the_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text(A)
    read = WorkersFile(file)
    file.write_text(B)  # as long as before
    os.utime(file, ns=(1, 1))
    assert read.check() == (NamedWorker(B),)
    file.write_text(A)
    os.utime(file, ns=(1, 1))
    assert read.check() == (NamedWorker(B),)


def test_a_missing_file_keeps_the_workers_and_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "workers"
    file.write_text(A)
    read = WorkersFile(file)
    file.unlink()
    with caplog.at_level(logging.ERROR):
        assert read.check() == read.check() == (NamedWorker(A),)
    assert len(caplog.records) == 1
    file.write_text(B)
    assert read.check() == (NamedWorker(B),)


def test_a_file_that_comes_back_is_read_also_with_an_unchanged_stamp(tmp_path: Path) -> None:
    """Regression: the next file can have the same inode and, in the same tick of the clock, the same time."""
    file, away = tmp_path / "workers", tmp_path / "away"
    file.write_text(A)
    os.utime(file, ns=(1, 1))
    read = WorkersFile(file)
    file.rename(away)
    assert read.check() == (NamedWorker(A),)
    away.write_text(B)  # of the same length
    os.utime(away, ns=(1, 1))
    away.rename(file)
    assert read.check() == (NamedWorker(B),)


def urls(workers: list[NamedWorker]) -> list[str]:
    return [worker.url for worker in workers]


def test_each_url_of_a_list_is_added_once() -> None:
    workers = WorkersFromList()
    named = [NamedWorker(A), NamedWorker(B), NamedWorker(A)]
    assert urls(workers.added(named, {}, leaving=())) == [A, B]
    workers.note(A, "a")
    assert urls(workers.added(named, {A: "a"}, leaving=())) == [B]
    workers.note(B, "b")
    assert workers.added(named, {B: "b"}, leaving=()) == [], "an operator has removed the worker at A"
    assert workers.removed([NamedWorker(A)]) == ["b"]


def test_a_list_does_not_remove_a_worker_that_an_operator_added() -> None:
    workers = WorkersFromList()
    assert workers.added([NamedWorker(A)], {A: "added by an operator"}, leaving=()) == []
    assert workers.removed([]) == []


def test_a_url_whose_worker_is_leaving_is_added_when_it_has_left() -> None:
    workers = WorkersFromList()
    workers.note(A, "a")
    assert workers.removed([]) == ["a"]
    workers.forget(A)
    assert workers.added([], {A: "a"}, leaving=["a"]) == []
    assert workers.added([NamedWorker(A)], {A: "a"}, leaving=["a"]) == []
    assert urls(workers.added([NamedWorker(A)], {}, leaving=())) == [A]
