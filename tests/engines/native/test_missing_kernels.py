"""The sentence that users see where the compiled kernels cannot run."""

import platform
from pathlib import Path

import pytest

from motet.engines.native import compiled_kernels
from motet.engines.native.compiled_kernels import FAILURE_FILE, KINDS, file_name, missing_kernels
from motet.system.machine import Processor

COST = "torch's operators run instead, which are several times slower"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of the libraries of an installation without kernels, on a processor with AVX2."""
    monkeypatch.setattr(compiled_kernels, "FOLDER", tmp_path)
    has_instruction_sets(monkeypatch, "fma", "sse4_2", "avx2")
    monkeypatch.setattr(compiled_kernels, "of_kind", lambda kind: None)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return tmp_path


def has_instruction_sets(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(compiled_kernels, "processor", lambda: Processor("Example 9000", frozenset(names)))


@pytest.mark.kernels
def test_nothing_is_said_where_the_kernels_can_run() -> None:
    assert missing_kernels() is None


def test_without_a_record_the_remedy_is_a_compiler(folder: Path) -> None:
    assert missing_kernels() == (
        f"The compiled kernels are missing (Motet was installed without compiling them), so {COST}: "
        "install g++ 11 or newer (apt-get install g++) and then run make setup."
    )


def test_the_failure_that_setup_recorded_is_shown(folder: Path) -> None:
    (folder / FAILURE_FILE).write_text("g++: error: unrecognized command-line option '-std=c++20'\n")
    assert "are missing (g++: error: unrecognized command-line option '-std=c++20'), so" in str(missing_kernels())


def test_outside_a_checkout_the_remedy_is_to_install_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = folder / "site-packages" / "motet" / "engines" / "native" / "compiled_kernels.py"
    monkeypatch.setattr(compiled_kernels, "__file__", str(installed))
    assert "and then install Motet again" in str(missing_kernels())


def test_no_compiler_is_suggested_for_a_processor_without_avx2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_instruction_sets(monkeypatch, "fma", "sse4_2", "avx")
    assert missing_kernels() == f"This processor lacks AVX2, which the compiled kernels need, so {COST}."


def test_a_compiler_is_suggested_where_the_instruction_sets_are_not_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_instruction_sets(monkeypatch)
    assert "install g++ 11 or newer" in str(missing_kernels())


def test_libraries_that_do_not_run_mean_a_processor_without_avx2(folder: Path) -> None:
    for kind in KINDS:
        (folder / file_name(kind)).touch()
    assert str(missing_kernels()).startswith("This processor lacks AVX2")


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")])
def test_no_compiler_is_suggested_for_another_machine(
    folder: Path, system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    reason = f"Compiled kernels exist only for Linux on x86-64 and not for {system} on {machine}"
    assert missing_kernels() == f"{reason}, so {COST}."
