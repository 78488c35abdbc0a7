"""A model folder is checked before an engine starts on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.errors import ModelLoadError
from motet.models.folder import check_model
from tests.models.model_folders import write_model, write_safetensors

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def test_a_complete_folder_passes(tmp_path: Path) -> None:
    check_model(write_model(tmp_path))


def test_a_sharded_folder_passes_when_every_shard_exists(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(tmp_path / "model-1.safetensors")
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors is missing"):
        check_model(tmp_path)
    write_safetensors(tmp_path / "model-2.safetensors")
    check_model(tmp_path)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda m: (m / "config.json").unlink(), "config.json is missing"),
        (lambda m: (m / "config.json").write_text("{"), "config.json is broken"),
        (lambda m: (m / "config.json").write_text("[]"), "an object was expected"),
        (lambda m: (m / "config.json").write_text("{}"), "has no model_type"),
        (lambda m: (m / "config.json").write_bytes(b"\xff\xfe"), "config.json is broken"),
        (lambda m: (m / "model.safetensors").unlink(), "has no weights"),
        (lambda m: (m / "model.safetensors").write_bytes(b""), "is not a safetensors file"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 64), "is not a safetensors file"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\x04" + bytes(7) + b"nope"), "broken header"),
        (lambda m: (m / "model.safetensors").write_text(LFS_POINTER), "git lfs pull"),
        (lambda m: (m / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    ],
)
def test_the_error_names_what_is_wrong(tmp_path: Path, break_it: Callable[[Path], object], message: str) -> None:
    break_it(write_model(tmp_path))
    with pytest.raises(ModelLoadError) as caught:
        check_model(tmp_path)
    assert message in caught.value.message


@pytest.mark.parametrize("lost", [1, 7, 8])
def test_truncated_weights_are_detected(tmp_path: Path, lost: int) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-lost])
    with pytest.raises(ModelLoadError, match="but its header states"):
        check_model(tmp_path)
