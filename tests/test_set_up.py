"""Set-up falls back to pip where uv cannot install, says so, and never marks an incomplete environment as complete.
It records why the kernels could not be compiled."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from motet.engines.native.compiled_kernels import FAILURE_FILE
from motet.settings.server_config import environment
from tools import set_up

UNREACHABLE = "error: Failed to fetch torch's index"


@dataclass
class Installers:
    """Replaces uv and pip. A call that contains `failing` fails."""

    failing: str = "no call"
    calls: list[str] = field(default_factory=list)

    def uv(self, *words: str) -> None:
        self.call("uv", *words)

    def pip(self, *words: str, shown: bool = False) -> None:
        self.call("pip", *words)

    def call(self, *words: str) -> None:
        self.calls.append(" ".join(words))
        if self.failing in self.calls[-1]:
            raise set_up.NotInstalled(UNREACHABLE)


@pytest.fixture
def installers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installers:
    fake = Installers()
    monkeypatch.setattr(set_up, "uv", fake.uv)
    monkeypatch.setattr(set_up, "pip", fake.pip)
    monkeypatch.setattr(set_up, "make_venv", lambda: None)
    monkeypatch.setattr(set_up, "READY", tmp_path / "ready")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    return fake


def test_uv_installs_everything_with_the_requested_build(
    installers: Installers, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up.set_up("auto")
    assert "takes two minutes" in capsys.readouterr().err, "uv and the compiler are silent"
    assert [call.split()[0] for call in installers.calls] == ["pip", "uv"]
    assert "--torch-backend auto" in installers.calls[1]
    assert set_up.READY.read_text() == "auto\n"


def test_another_build_replaces_the_installed_one(installers: Installers) -> None:
    set_up.set_up("cpu")
    set_up.set_up("cu130")
    assert "--reinstall-package torch" not in installers.calls[1]
    assert "--reinstall-package torch" in installers.calls[-1]


def test_without_uv_pip_installs_everything(installers: Installers, capsys: pytest.CaptureFixture[str]) -> None:
    installers.failing = "uv"
    set_up.set_up("auto")
    assert [call.split()[:2] for call in installers.calls[-3:]] == [
        ["pip", "torch==2.13.0"], ["uv", "--editable"], ["pip", "--editable"],
    ]  # fmt: skip
    assert UNREACHABLE in capsys.readouterr().err


def test_without_torchs_index_pip_installs_only_torch(installers: Installers) -> None:
    installers.failing = "--torch-backend"
    set_up.set_up("cpu")
    assert [call.split()[:2] for call in installers.calls[-2:]] == [["pip", "torch==2.13.0"], ["uv", "--editable"]]


def test_pip_cannot_replace_uv_for_one_of_several_cuda_builds(installers: Installers) -> None:
    installers.failing = "--torch-backend"
    set_up.READY.write_text("auto\n")
    with pytest.raises(set_up.NotInstalled, match="TORCH_BACKEND=cu130 needs uv and torch's index"):
        set_up.set_up("cu130")
    assert not set_up.READY.exists(), "an incomplete environment is not taken for a complete one"


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo 'a.cpp: error: no such option' >&2; echo 'compilation terminated.' >&2; exit 1",
            "a.cpp: error: no such option",
        ),
        (None, "there was no C++ compiler, {compiler}"),
    ],
)
def test_the_reason_why_the_kernels_were_not_compiled_is_recorded(
    script: str | None, reason: str, tmp_path: Path
) -> None:
    compiler, folder = tmp_path / "c++", tmp_path / "lib"
    if script:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    options = ["--build-lib", str(folder), "--build-temp", str(tmp_path / "temporary")]
    environ = {**environment(), "CC": str(compiler), "CXX": str(compiler)}
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", *options],
        cwd=set_up.ROOT,
        env=environ,
        capture_output=True,
        check=True,
    )
    (record,) = folder.rglob(FAILURE_FILE)
    assert record.read_text() == reason.format(compiler=compiler) + "\n"
