"""Slow stages on a terminal and in a pipe."""

import io

import pytest
from rich.console import Console

from motet.models.progress import Lines
from motet.models.progress_bars import Bars, terminal_progress


def test_a_download_has_a_bar_with_bytes_and_a_conversion_a_spinner() -> None:
    screen = io.StringIO()
    bars = Bars(Console(file=screen, force_terminal=True, color_system=None, width=80))
    with bars.stage("downloading m [x]", 93_000_000) as report:
        report(31_000_000)
        report(99_000_000)
    with bars.stage("converting"):
        assert "0:00:0" in screen.getvalue().rpartition("converting")[2]
    assert "downloading m [x]" in screen.getvalue()
    assert "93.0/93.0 MB" in screen.getvalue()


def test_a_pipe_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = terminal_progress(print)
    assert isinstance(progress, Lines)
    with progress.stage("downloading m", 93_000_000) as report:
        report(31_000_000)
    assert capsys.readouterr().out == "downloading m (93 MB)\n"
