"""A model folder is checked before an engine starts on it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.errors import ModelLoadError
from motet.models.folder import INDEX, MAX_JSON_BYTES, WEIGHTS, check_model
from motet.system.threads import in_daemon_thread
from tests.models.model_folders import write_model, write_safetensors
from tests.patience import PATIENCE_S

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def _index(folder: Path, weight_map: str) -> None:
    """Writes an index in place of the weights."""
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(f'{{"weight_map": {weight_map}}}')


def test_a_complete_folder_passes(tmp_path: Path) -> None:
    check_model(write_model(tmp_path))


def test_a_sharded_folder_passes_when_every_shard_exists(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(tmp_path / "model-1.safetensors", name="a")
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors is missing"):
        check_model(tmp_path)
    write_safetensors(tmp_path / "model-2.safetensors", name="b")
    check_model(tmp_path)
    (tmp_path / "model-1.safetensors").rename(tmp_path / "x")
    (tmp_path / "model-2.safetensors").rename(tmp_path / "model-1.safetensors")
    (tmp_path / "x").rename(tmp_path / "model-2.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"model-1\.safetensors has no tensor a, .*; it is in model-2\.safetensors"
    ):
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
        (lambda m: (m / "config.json").write_text("[" * 100_000), "config.json is broken"),
        (lambda m: (m / "config.json").write_bytes(bytes(MAX_JSON_BYTES + 1)), "and at most 16777216 are read"),
        (lambda m: (m / "model.safetensors").write_text(LFS_POINTER), "git lfs pull"),
        (lambda m: (m / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda m: (m / INDEX).write_text('{"weight_map": {}}'), "has an empty weight_map"),
        (lambda m: (m / INDEX).write_text('{"weight_map": {"a": [1]}}'), "Expected `str`, got `array`"),
        (lambda m: _index(m, '{"a": "../x"}'), "not the name of a file in its folder"),
        (lambda m: _index(m, '{"a": "x\\u0000"}'), "is missing"),
        (lambda m: (m / INDEX).write_text("[" * 100_000), "has no weight_map"),
        (lambda m: (m / INDEX).write_bytes(b"\xff\xfe"), "has no weight_map"),
        (lambda m: os.mkfifo(m / INDEX), "index.json cannot be read: it is not a regular file"),
        (lambda m: os.mkfifo(m / "tokenizer_config.json"), "tokenizer_config.json cannot be read: it is not a regular"),
        (lambda m: os.mkfifo(m / "a.safetensors"), "a.safetensors cannot be read: it is not a regular file"),
        (lambda m: (m / "a.safetensors").symlink_to("/dev/zero"), "a.safetensors cannot be read: it is not a regular"),
        (lambda m: (m / WEIGHTS).rename(m / "x") and (m / WEIGHTS).mkdir(), "cannot be read: it is a folder"),
        (lambda m: (m / INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}'), "which does not name it: remove"),
        (lambda m: (m / WEIGHTS).rename(m / "pytorch_model.bin"), "`python -m motet.models.convert"),
        (
            lambda m: (m / INDEX).write_text('{"weight_map": {"v": "model.safetensors"}}'),
            "has no tensor v, which",
        ),
    ],
)
def test_the_error_names_what_is_wrong(tmp_path: Path, break_it: Callable[[Path], object], message: str) -> None:
    break_it(write_model(tmp_path))
    checking = in_daemon_thread(lambda: check_model(tmp_path), name="check")  # opening a FIFO would take for ever
    with pytest.raises(ModelLoadError) as caught:
        checking.result(PATIENCE_S)
    assert message in caught.value.message


@pytest.mark.parametrize("lost", [1, 7, 8])
def test_truncated_weights_are_detected(tmp_path: Path, lost: int) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-lost])
    with pytest.raises(ModelLoadError, match="but its header states"):
        check_model(tmp_path)
