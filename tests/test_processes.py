"""`--processes` runs every test once, prints the reports of all processes, and fails if a process dies."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from motet.settings.server_config import environment

pytestmark = pytest.mark.slow

MODULES = {
    "passing": "import os\nprint(os.getpid())\ndef test_a(): pass\ndef test_b(): print('unseen')",
    "failing": "def test_c():\n    print('seen')\n    assert [1] == [2]",
    "erring": "import pytest\n@pytest.fixture\ndef broken():\n    yield\n    1 / 0\ndef test_d(broken): pass",
    "skipping": "import pytest\ndef test_e(): pytest.skip('not today')",
    "dying": "import os, signal\ndef test_f(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_g(): pass",
    "leaving": "import atexit, os\ndef test_h(): atexit.register(os._exit, 5)",
}


def run_in_processes(folder: Path, names: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on these modules with two processes."""
    for name in names:
        (folder / f"test_{name}.py").write_text(MODULES[name])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.processes", "--processes=2", *options, str(folder)],
        env={**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_test_runs_once_and_failures_are_shown_with_their_output(tmp_path: Path) -> None:
    run = run_in_processes(tmp_path, ["passing", "failing", "erring", "skipping"], "-rs", "--durations=0", "-vv")
    assert "1 failed, 3 passed, 1 skipped, 1 error" in run.stdout, run.stdout
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"Captured stdout call -+\nseen\n", run.stdout)
    assert "unseen" not in run.stdout
    assert "assert [1] == [2]" in run.stdout
    assert "not today" in run.stdout


def test_a_run_without_failures_succeeds(tmp_path: Path) -> None:
    run = run_in_processes(tmp_path, ["passing", "skipping"])
    assert (run.returncode, "2 passed, 1 skipped" in run.stdout) == (pytest.ExitCode.OK, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dying", "The test process ended by SIGKILL, in or after this test"),
        ("leaving", "The test process ended with exit code 5, in or after this test"),
    ],
)
def test_a_process_that_dies_is_a_failure(tmp_path: Path, name: str, message: str) -> None:
    run = run_in_processes(tmp_path, [name, "passing"])
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert message in run.stdout, run.stdout
    assert "1 failed" in run.stdout


def test_the_run_stops_after_the_maximum_of_failures(tmp_path: Path) -> None:
    run = run_in_processes(tmp_path, ["failing", "passing"], "-x")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in run.stdout, run.stdout
