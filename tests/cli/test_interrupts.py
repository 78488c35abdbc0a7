"""Ctrl-C at any moment of a command ends it without a traceback. Real processes, since imports are a part of it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

PYTHON_STARTS_S = 0.2
"""Seconds from the start of a process in which the interpreter, before it runs Motet, can lose a SIGINT."""


def interrupt(arguments: Sequence[str], *, after_s: float) -> None:
    """Starts a command, and sends SIGINT to it and its children, as a terminal does."""
    command = [sys.executable, "-m", "motet", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        time.sleep(after_s)  # the moment is what is tested, whatever the process does then
        os.killpg(process.pid, signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            if after_s >= PYTHON_STARTS_S:
                raise
            os.killpg(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    places = re.findall(r'File "([^"]*)"', stderr)
    assert all(place.startswith("<frozen") for place in places), stderr  # the interpreter's own traceback, before Motet
    assert "ERROR" not in stderr and "CRITICAL" not in stderr, stderr
    # The interpreter ends a process by the signal itself before it has a handler, and while it ends. With 1, it was
    # interrupted in its own start.
    assert process.returncode in (130, 0, -signal.SIGINT) or "init_import_site" in stderr, stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("model"))))


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.1, 0.5, 2.5])
def test_ctrl_c_at_the_start_of_a_server_prints_no_traceback(model: str, after_s: float) -> None:
    interrupt(["serve", model, "--port", "0"], after_s=after_s)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("second", range(6))
def test_ctrl_c_at_every_moment_prints_no_traceback(model: str, second: int) -> None:
    for step in range(20):
        interrupt(["serve", model, "--port", "0"], after_s=second + step / 20)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", ["demo --single", "chat hello", "models list", "--help", "ray --ray-address local"]
)
def test_ctrl_c_ends_every_command_without_a_traceback(tmp_path: Path, arguments: str) -> None:
    for after_s in (0.1, 0.3, 0.6, 1.0, 2.0, 4.0):
        interrupt(arguments.split(), after_s=after_s)
