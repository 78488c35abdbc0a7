"""Models with a name on the hub, on a machine that cannot reach the hub."""

import subprocess
import sys
from pathlib import Path

import pytest

from motet.settings.server_config import environment
from tests.models.model_folders import write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def pull(name: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs `motet models pull` in a separate process, as the hub's client reads its settings when it is imported."""
    command = [sys.executable, "-m", "motet", "models", "pull", name]
    own = {"HF_HOME": str(home), "MOTET_CACHE_DIR": str(home / "motet"), **environ}
    return subprocess.run(command, env={**environment(), **own}, capture_output=True, text=True, check=False)


def keep(home: Path, name: str) -> Path:
    """Writes a model to the hub's cache, as a download does."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return write_model(folder / "snapshots" / COMMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}], ids=["configured", "detected"]
)
def test_offline_a_model_comes_from_the_hubs_cache_or_the_error_names_it(tmp_path: Path, how: dict[str, str]) -> None:
    snapshot = keep(tmp_path, "org/kept")
    assert pull("org/kept", tmp_path, **how).stdout.strip() == str(snapshot)
    missing = pull("org/missing", tmp_path, **how)
    assert missing.returncode == 3
    assert "org/missing is not in the cache" in missing.stderr.splitlines()[-1]
    assert "Traceback" not in missing.stderr


@pytest.mark.slow
def test_the_error_names_the_defect_of_a_model_in_the_hubs_cache(tmp_path: Path) -> None:
    (keep(tmp_path, "org/kept") / "model.safetensors").unlink()
    broken = pull("org/kept", tmp_path, HF_HUB_OFFLINE="1")
    assert broken.returncode == 3
    assert "has no weights" in broken.stderr
