"""Models with a name on the hub: on a machine that cannot reach the hub, and from a hub on loopback."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

from motet.errors import ModelLoadError
from motet.models import hub
from motet.models.hub import download
from motet.models.progress import SILENT
from motet.settings.server_config import environment
from tests.models.fake_hub import COMMIT, INVALID_TOKEN, FakeHub
from tests.models.model_folders import write_model, write_safetensors

CHUNK_BYTES = 10 * 2**20
"""Bytes that the hub's client writes at once: it resumes at a multiple of them."""


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


def test_the_hubs_client_shows_other_downloads_of_the_process_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: after an `LLM` had started, downloads of data sets had no progress bar."""
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    enable_progress_bars()
    with pytest.raises(ModelLoadError, match="is not in the cache"):
        hub.fetch("org/absent", revision=None, patterns=hub.MODEL_PATTERNS)
    assert not are_progress_bars_disabled()
    assert logging.getLogger("huggingface_hub").level < logging.ERROR


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in write_model(folder).iterdir()}


@pytest.mark.slow
def test_a_model_is_downloaded_once_and_a_broken_connection_resumes(tmp_path: Path) -> None:
    files = files_of(tmp_path / "m")
    write_safetensors(tmp_path / "m" / "model.safetensors", data_bytes=2 * CHUNK_BYTES)
    files["model.safetensors"] = (tmp_path / "m" / "model.safetensors").read_bytes()
    with FakeHub({"org/public": files}, cut=CHUNK_BYTES + 1000) as hub:
        pulled = pull("org/public", tmp_path, HF_ENDPOINT=hub.url)
        again = pull("org/public", tmp_path, HF_ENDPOINT=hub.url)
    assert pulled.stderr.splitlines() == ["looking for org/public on the hub", "downloading org/public (21 MB)"]
    folder = Path(pulled.stdout.strip())
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    ranges = [range for path, range in hub.requests if path.endswith("model.safetensors")]
    assert ranges == ["", f"bytes={CHUNK_BYTES}-"]
    assert again.stdout == pulled.stdout
    assert again.stderr.splitlines() == ["looking for org/public on the hub"]


@pytest.mark.slow
@pytest.mark.long
def test_a_gated_model_needs_a_token_and_a_missing_one_is_named(tmp_path: Path) -> None:
    with FakeHub({"org/gated": files_of(tmp_path / "m")}, gated={"org/gated": "secret"}) as hub:
        refused = pull("org/gated", tmp_path, HF_ENDPOINT=hub.url)
        other = pull("org/gated", tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="another")
        missing = pull("org/none", tmp_path, HF_ENDPOINT=hub.url)
        unknown = pull("org/gated", tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=INVALID_TOKEN)
        assert pull("org/gated", tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="secret").returncode == 0
    assert (refused.returncode, other.returncode, missing.returncode) == (3, 3, 3)
    token = "the token of HF_TOKEN or `hf auth login`"
    terms = f"motet: org/gated is gated: accept its terms on {hub.url}/org/gated; {token}"
    assert refused.stderr.splitlines()[-1] == f"{terms} is needed"
    assert other.stderr.splitlines()[-1] == f"{terms} has no access to it"
    assert unknown.stderr.splitlines()[-1] == f"motet: org/gated: {hub.url} refuses {token}"
    assert missing.stderr.splitlines()[-1] == (
        f"motet: org/none: there is no such model on {hub.url}, or it is private and {token} is needed"
    )


def test_a_model_that_does_not_fit_on_the_disk_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    calls: list[bool] = []

    def snapshot(dry_run: bool = False) -> list[SimpleNamespace]:
        calls.append(dry_run)
        return [SimpleNamespace(file_size=10**18, will_download=True)]

    with pytest.raises(ModelLoadError, match=r"org/huge needs 1000000000.00 GB, .* free: set HF_HUB_CACHE"):
        download(snapshot, "org/huge", shown="org/huge", progress=SILENT)
    assert calls == [True]


@pytest.mark.long
def test_a_download_that_never_ends_is_one_line(tmp_path: Path) -> None:
    files = files_of(tmp_path / "m")
    with FakeHub({"org/broken": {**files, "model.safetensors": b"x" * 1000}}, cut=-1) as hub:
        broken = pull("org/broken", tmp_path, HF_ENDPOINT=hub.url, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert broken.returncode == 3
    assert "org/broken could not be downloaded: " in broken.stderr.splitlines()[-1]
    assert "Traceback" not in broken.stderr


@pytest.mark.parametrize("error", [TypeError("not a mapping"), ValueError("'../x'\nadvice"), KeyError("sha")], ids=repr)
def test_an_invalid_answer_of_the_hub_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy can answer in place of the hub, with any JSON, and names of files can leave the folder."""

    def snapshot_download(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    with pytest.raises(ModelLoadError, match=r"^org/name could not be downloaded: .* sent an invalid answer \(.*\)$"):
        hub.fetch("org/name", revision=None, patterns=("*",))
