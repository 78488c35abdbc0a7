"""The types of the source on macOS and Windows, whose standard library lacks modules and functions of Linux."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_source_uses_nothing_that_another_system_lacks(platform: str) -> None:
    command = [sys.executable, "-m", "mypy", "--platform", platform, "--cache-dir", f".mypy_cache/{platform}", "src"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
