"""The rules of the test run, tried on small runs of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = """\
[pytest]
markers =
    gpu: x
    real: x
    slow: x
"""


def run_pytest(folder: Path, test_file: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(test_file)
    (folder / "pytest.ini").write_text(SETTINGS)
    options = ["-p", "tests.strict", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run([sys.executable, "-m", "pytest", *options], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "test_file",
    [
        'import pytest\ndef test_a(): pytest.skip("not today")',
        'import pytest\n@pytest.mark.skip(reason="not today")\ndef test_a(): pass',
        'import pytest\npytest.skip("not today", allow_module_level=True)',
        'import pytest\npytest.importorskip("no_such_module")',
        "import pytest\n@pytest.mark.gpu\n@pytest.mark.skip\ndef test_a(): pass",
    ],
    ids=["inside a test", "by a mark", "a whole module", "a missing import", "gpu without a reason"],
)
def test_a_skip_fails_the_run(tmp_path: Path, test_file: str) -> None:
    result = run_pytest(tmp_path, test_file)
    assert result.returncode != 0
    assert "a skip fails the run" in result.stdout


@pytest.mark.parametrize("mark", ["gpu", "real"])
def test_gpu_and_real_may_skip_with_a_reason(tmp_path: Path, mark: str) -> None:
    result = run_pytest(tmp_path, f'import pytest\n@pytest.mark.{mark}\ndef test_a(): pytest.skip("no device here")')
    assert result.returncode == 0, result.stdout


def test_an_expected_failure_is_not_a_skip(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "import pytest\n@pytest.mark.xfail\ndef test_a(): assert False")
    assert result.returncode == 0, result.stdout
