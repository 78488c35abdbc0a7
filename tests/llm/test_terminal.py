"""The start of the server of an `LLM`, and what a terminal shows of it and of its prompts."""

import contextlib
import logging
import os
import pty
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

from motet import LLM, SamplingParams
from motet.deploy.child import ChildServer
from motet.errors import StartupError
from motet.llm.own_server import LLMServer, ServerSettings
from motet.models.progress import Progress
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import fake_answer, save_tiny_tokenizer

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""A control sequence of a terminal: a color, or a movement of the cursor."""
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """A pseudo-terminal, which is standard error while the `with` lasts. A thread reads it, so that writers never
    wait."""

    def __init__(self) -> None:
        self._received = b""
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._master, other_side = pty.openpty()
        self._stderr, sys.stderr = sys.stderr, os.fdopen(other_side, "w", encoding="utf-8")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        sys.stderr.close()
        sys.stderr = self._stderr
        self._thread.join()
        os.close(self._master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # raised on Linux when the other side is closed
            while received := os.read(self._master, 4096):
                self._received += received

    @property
    def shown(self) -> str:
        """Everything that was written, with control sequences."""
        return self._received.decode()


@pytest.fixture(autouse=True)
def terminal_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


def lines_of(shown: str) -> list[str]:
    """Returns the states of the lines that were shown, in the order of time."""
    return [line.strip() for line in SEQUENCE.sub("", shown).splitlines() if line.strip()]


def test_a_progress_bar_ends_with_all_prompts_and_the_rate(tmp_path: Path) -> None:
    params = SamplingParams(n=2, max_tokens=20)
    server = FakeServer(save_tiny_tokenizer(tmp_path), lambda *_: fake_answer("an answer"))
    with server, LLM(url=server.url) as llm, Terminal() as terminal:
        llm.generate(["one", "two", "three"], params)
        llm.generate("four", params, use_tqdm=False)
    lines = lines_of(terminal.shown)
    assert re.fullmatch(r"prompts ━+ 3/3 [\d,]+ tokens/s 0:00:00", lines[-1])
    assert lines[0].startswith("prompts ━") and "/3 " in lines[0]
    assert terminal.shown.count(HIDE_CURSOR) == terminal.shown.count(SHOW_CURSOR) == 1


class InstantServer(ChildServer):
    """A server that is ready at once, without a process."""

    def __enter__(self) -> ChildServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def started(folder: Path, **settings: object) -> None:
    server = LLMServer(ServerSettings({"model": str(folder), **settings}, environ={}), child=InstantServer)
    server.start()
    server.close()


@pytest.mark.parametrize("level", ["info", "warning"])
def test_a_start_is_shown_while_it_lasts_unless_the_log_level_forbids_it(tmp_path: Path, level: str) -> None:
    with Terminal() as terminal:
        started(tmp_path, log_level=level)
    shown = terminal.shown
    assert (f"loading {tmp_path}" in SEQUENCE.sub("", shown)) == (level == "info")
    assert shown.count(HIDE_CURSOR) == shown.count(SHOW_CURSOR)
    if level == "info":
        assert shown.endswith("\x1b[2K")  # the line is cleared


def test_a_start_without_a_terminal_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="motet.llm"):
        started(tmp_path)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert caplog.messages[0] == f"loading {tmp_path}"
    assert re.fullmatch(rf"{re.escape(str(tmp_path))} is ready after \d\.\d s", caplog.messages[1])
    assert capsys.readouterr() == ("", "")


class WaitingDownload(ServerSettings):
    """Settings of a model whose download ends when a test allows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__({"model": str(folder)}, environ={})
        self.has_started, self.may_end = threading.Event(), threading.Event()

    def download(self, progress: Progress) -> None:
        self.has_started.set()
        self.may_end.wait()


def test_a_server_can_be_closed_while_its_model_is_downloaded(tmp_path: Path) -> None:
    settings = WaitingDownload(tmp_path)
    server = LLMServer(settings, child=InstantServer)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(server.start)
        settings.has_started.wait()
        server.close()
        settings.may_end.set()
        with pytest.raises(StartupError, match="the LLM is closed"):
            starting.result()
