"""The rules of the test run. Most of them are tested with a small run."""

import re
import subprocess
import sys
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from motet.settings.server_config import environment
from tests.kernels import NEEDED, skip_or_fail, why_not

SETTINGS = """\
[pytest]
markers =
    gpu: x
    real: x
    hosts: x
    clients: x
    slow: x
filterwarnings =
"""
FILTERS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]

WARNS = "import warnings\ndef test_a(): exec('warnings.warn(\"old\", DeprecationWarning)', {module})"
"""A test in which a module with the given name warns about its own line."""
REFUSED = {
    "inside_a_test": 'import pytest\ndef test_a(): pytest.skip("not today")',
    "by_a_mark": 'import pytest\n@pytest.mark.skip(reason="not today")\ndef test_a(): pass',
    "a_whole_module": 'import pytest\npytest.skip("not today", allow_module_level=True)',
    "a_missing_import": 'import pytest\npytest.importorskip("no_such_module")',
    "gpu_without_a_reason": "import pytest\n@pytest.mark.gpu\n@pytest.mark.skip\ndef test_a(): pass",
    "hosts_without_a_reason": "import pytest\n@pytest.mark.hosts\n@pytest.mark.skip\ndef test_a(): pass",
}
LEAKING = {
    "a_warning_of_motet": WARNS.format(module='{"warnings": warnings, "__name__": "motet.engine"}'),
    "an_unclosed_file": "def test_a(): open(__file__)",
    "an_unclosed_loop": "import asyncio, gc\ndef test_a():\n    asyncio.new_event_loop()\n    gc.collect()",
    "a_coroutine_never_awaited": "async def work(): ...\ndef test_a(): work()",
    "a_thread_that_fails": (
        "import threading\n"
        "def test_a():\n"
        "    thread = threading.Thread(target=lambda: 1 / 0)\n"
        "    thread.start()\n"
        "    thread.join()"
    ),
}
"""Tests that fail through a warning."""
ALLOWED = {
    "gpu_with_a_reason": 'import pytest\n@pytest.mark.gpu\ndef test_a(): pytest.skip("no device here")',
    "real_with_a_reason": 'import pytest\n@pytest.mark.real\ndef test_a(): pytest.skip("no weights here")',
    "hosts_with_a_reason": 'import pytest\n@pytest.mark.hosts\ndef test_a(): pytest.skip("no root here")',
    "clients_with_a_reason": 'import pytest\n@pytest.mark.clients\ndef test_a(): pytest.skip("no such package here")',
    "an_expected_failure": "import pytest\n@pytest.mark.xfail\ndef test_a(): assert False",
    "a_warning_of_another_package": WARNS.format(module='{"warnings": warnings, "__name__": "triton.compiler"}'),
}


@dataclass(frozen=True)
class Run:
    exit_code: int
    failed: frozenset[str]
    """The names of the files with a failure."""
    output: str


def run_pytest(folder: Path, files: dict[str, str]) -> Run:
    filters = "".join(f"    {one}\n" for one in FILTERS["filterwarnings"])
    (folder / "pytest.ini").write_text(SETTINGS + filters)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    options = ["-rA", "-p", "tests.strict", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), str(folder)],
        env={**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) \S*test_(\w+)\.py", result.stdout, re.MULTILINE)
    return Run(result.returncode, frozenset(failed), result.stdout)


@pytest.mark.parametrize(
    ("flags", "compiler", "expected"),
    [
        ({"sse", "avx2", "fma"}, "/usr/bin/c++", ""),
        ({"sse", "avx2"}, "/usr/bin/c++", "this processor has no fma"),
        ({"sse", "avx2", "fma"}, None, "there is no C++ compiler here, and the kernels were not built elsewhere"),
    ],
    ids=["both", "no-instruction", "no-compiler"],
)
def test_kernels_can_be_missing_only_without_a_compiler_or_an_instruction(
    flags: set[str], compiler: str | None, expected: str
) -> None:
    assert why_not(NEEDED["avx2"], flags, compiler) == expected


def test_missing_kernels_that_could_be_built_here_are_a_failure() -> None:
    with pytest.raises(pytest.fail.Exception, match="build is broken"):
        skip_or_fail("")
    with pytest.raises(pytest.skip.Exception, match="this processor has no fma"):
        skip_or_fail("this processor has no fma")


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_pytest(tmp_path_factory.mktemp("refused"), REFUSED | LEAKING)


@pytest.mark.parametrize("module", ["motet", "motet.engine", "tests.api.test_app", "tools.sizes", "bench.fork"])
def test_a_warning_of_an_own_module_is_an_error(module: str) -> None:
    """The filters of this run are in force in this test."""
    with pytest.raises(DeprecationWarning, match="old"):
        warnings.warn_explicit("old", DeprecationWarning, "a.py", 1, module=module)


@pytest.mark.parametrize("module", ["triton.compiler.code_generator", "motet_client", "numpy.tests", "asyncio"])
def test_a_warning_of_another_module_is_not_an_error(module: str) -> None:
    with warnings.catch_warnings(record=True) as recorded:
        warnings.warn_explicit("old", DeprecationWarning, "a.py", 1, module=module)
        warnings.warn_explicit("strange", UserWarning, "a.py", 1, module=module)
    assert [str(one.message) for one in recorded] == ["strange"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKING)
def test_a_warning_of_motet_or_a_leak_is_a_failure(refused: Run, name: str) -> None:
    assert name in refused.failed, refused.output


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_skip_is_a_failure(refused: Run, name: str) -> None:
    assert name in refused.failed


@pytest.mark.slow
def test_a_skip_fails_the_run_with_the_reason(refused: Run) -> None:
    assert refused.exit_code == 1
    assert "a skip fails the run" in refused.output


@pytest.mark.slow
def test_some_marks_can_skip_with_a_reason_and_an_expected_failure_is_not_a_skip(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, ALLOWED)
    assert run.exit_code == 0, run.output
