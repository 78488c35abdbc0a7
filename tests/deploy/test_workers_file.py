"""The file that names workers: what is read, what is skipped, and when it is read again."""

import logging
import os
from pathlib import Path

import pytest

from motet.deploy.worker_list import WorkersFile
from motet.settings.named_worker import NamedWorker
from motet.types import Role

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def test_lines_name_workers_with_a_role_or_without(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text(f"# the first\n{A}/v1/,prefill\n\n  {B} , decode # the second\n{A}\n")
    assert WorkersFile(file).named == (NamedWorker(A, Role.PREFILL), NamedWorker(B, Role.DECODE))


def test_a_broken_line_is_logged_and_the_others_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_file_that_comes_back_is_read_also_if_it_looks_as_before(tmp_path: Path) -> None:
    """A system that gives its number to the next file, in the same tick of its clock, made it look unchanged."""
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
