"""Set-up falls back to pip where uv cannot install, says so, and never marks an incomplete environment as complete."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools import set_up

UNREACHABLE = "error: Failed to fetch torch's index"


@dataclass
class Installers:
    """Replaces uv and pip. Calls whose words contain `failing` fail."""

    failing: str = "no call"
    calls: list[str] = field(default_factory=list)
    torch: str = "2.13.0 13.0"
    """Version of torch and of CUDA that pip finds."""

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
    monkeypatch.setattr(set_up, "query", lambda program: fake.torch)
    monkeypatch.setattr(set_up, "make_venv", lambda: None)
    monkeypatch.setattr(set_up, "READY", tmp_path / "ready")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("shutil.which", lambda name: None)
    return fake


def test_uv_installs_everything_with_the_requested_build(installers: Installers) -> None:
    set_up.set_up("auto")
    assert [call.split()[0] for call in installers.calls] == ["pip", "uv"]
    assert "--torch-backend auto" in installers.calls[1]
    assert set_up.READY.read_text() == "auto\n"


def test_another_build_replaces_the_installed_one(installers: Installers) -> None:
    set_up.set_up("cpu")
    set_up.set_up("cu130")
    assert "--reinstall-package torch" not in installers.calls[1]
    assert "--reinstall-package torch" in installers.calls[-1]


def test_without_uv_pip_installs_everything(installers: Installers, capsys: pytest.CaptureFixture[str]) -> None:
    installers.failing = set_up.UV
    set_up.set_up("auto")
    assert [call.split()[0] for call in installers.calls] == ["pip", "pip", "pip"]
    said = capsys.readouterr().err
    assert UNREACHABLE in said
    assert "6 GB in place of 2 GB" in said


def test_without_torchs_index_pip_installs_torch(installers: Installers, capsys: pytest.CaptureFixture[str]) -> None:
    installers.failing, installers.torch = "--torch-backend", "2.13.0+cpu None"
    set_up.set_up("cpu")
    assert [call.split()[:2] for call in installers.calls[-2:]] == [["pip", "torch==2.13.0"], ["uv", "--editable"]]
    assert "it found the CPU build" in capsys.readouterr().err


def test_pip_cannot_replace_uv_for_one_of_several_cuda_builds(installers: Installers) -> None:
    installers.failing = "--torch-backend"
    set_up.READY.write_text("auto\n")
    with pytest.raises(set_up.NotInstalled, match="TORCH_BACKEND=cu130 needs uv and torch's index"):
        set_up.set_up("cu130")
    assert not set_up.READY.exists(), "an incomplete environment is not taken for a complete one"
