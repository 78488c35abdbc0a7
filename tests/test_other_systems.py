"""The source has a branch for what only some systems have: it type-checks for macOS and Windows too."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages.conftest import ROOT


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_source_type_checks_for_another_system(platform: str, tmp_path: Path) -> None:
    """mypy then reports names that the standard library lacks on that system."""
    command = [sys.executable, "-m", "mypy", "--platform", platform, "--cache-dir", str(tmp_path), "src"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
