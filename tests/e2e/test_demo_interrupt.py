"""Ctrl-C ends the demo, its server and all engines, also while they start."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from motet.settings.server_config import environment
from tests.e2e.processes import wait_until_gone
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

NUM_PROCESSES = 2
"""The server, and its engine."""


def test_ctrl_c_during_the_start_of_the_demo_leaves_no_process(folder: Path) -> None:
    command = [sys.executable, "-m", "motet", "demo", "--single", "--model", str(folder)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as demo:
        deadline, started = time.monotonic() + PATIENCE_S, list[psutil.Process]()
        while len(started) < NUM_PROCESSES:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        _, output = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 130
    assert "Traceback" not in output
    for process in started:
        wait_until_gone(process.pid, PATIENCE_S)
