"""`motet chat` on a terminal, as a process of its own: Ctrl-C ends an answer and not the chat."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from motet.settings.server_config import environment
from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import build_tiny_tokenizer, fake_answer

pytestmark = pytest.mark.slow

IN_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""A program that runs its arguments on a terminal, whose keyboard and screen are its own standard streams."""
ALTERNATE_SCREEN_ENDS = "\x1b[?1049l"
NUM_STEPS = 9


class Terminal:
    """A command on a terminal of 80 columns and 24 lines."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._unread = ""

    def type(self, keys: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(keys.encode())
        self._process.stdin.flush()

    def wait_for(self, text: str) -> str:
        """Waits until the command has printed `text`, and returns what it printed before since the last wait."""
        assert self._process.stdout is not None
        while text not in self._unread:
            piece = os.read(self._process.stdout.fileno(), 4096)
            assert piece, f"the command ended before {text!r}: {self._unread}"
            self._unread += piece.decode(errors="replace")
        before, _, self._unread = self._unread.partition(text)
        return before

    def end(self) -> int:
        return self._process.wait()


@contextmanager
def terminal(command: list[str], cache: Path) -> Iterator[Terminal]:
    size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, sys.executable, "-m", "motet", *command],
        env={**environment(), **size, "MOTET_CACHE_DIR": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            yield Terminal(process)
        finally:
            process.kill()


def repeat(request: GenerateRequest, start: ChoiceStart) -> list[int]:
    return fake_answer(f"word{start.index} ", eos=False)


def test_ctrl_c_ends_an_answer_and_the_conversation_continues(folder: Path, tmp_path: Path) -> None:
    with FakeServer(folder, repeat) as server:
        server.engine.scenario.gate = asyncio.Semaphore(NUM_STEPS)
        with terminal(["chat", "--url", server.url, "-n", "2", "--max-tokens", "50"], tmp_path) as chat:
            chat.wait_for("you> ")
            chat.type("hello\r")
            chat.wait_for("word1")
            chat.type("\x03")
            chat.wait_for(ALTERNATE_SCREEN_ENDS)
            assert "word0" in chat.wait_for("stopped")
            chat.wait_for("continue with choice")
            chat.type("1\r")
            chat.wait_for("you> ")
            server.engine.scenario.gate = None
            chat.type("/n 1\r")
            chat.wait_for("n is 1")
            chat.type("and now?\r")
            chat.wait_for("50 tokens in")
            chat.wait_for("you> ")
            chat.type("\x04")
            assert chat.end() == 0
        prompt = build_tiny_tokenizer().decode(list(server.engine.requests[-1].prompt), skip_special_tokens=False)
    assert "word1" in prompt
    assert "word0" not in prompt
    assert (tmp_path / "chat_history").read_text().count("+") == 3


def test_a_server_that_does_not_answer_is_one_line_with_advice(tmp_path: Path) -> None:
    with terminal(["chat", "--url", "http://127.0.0.1:1"], tmp_path) as chat:
        assert "http://127.0.0.1:1 does not answer" in chat.wait_for("start a server with `motet serve`")
        assert chat.end() == 1
