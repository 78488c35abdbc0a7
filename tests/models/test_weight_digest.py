"""Other weights have another digest, and the same weights in other files have the same digest."""

import json
import os
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from motet.errors import ModelLoadError
from motet.models import weight_digest
from motet.models.folder import INDEX
from motet.models.weight_digest import KEPT, start_weights_digest, weights_digest
from tests.patience import PATIENCE_S

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def saved(folder: Path, *shards: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Writes a folder with these files, and an index if there are several."""
    folder.mkdir(exist_ok=True)
    names = [f"model-{number}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata)
    if len(shards) > 1:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


def digest(folder: Path, *shards: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    return weights_digest([saved(folder, *shards, metadata=metadata)], folder / "cache")


@pytest.mark.parametrize(
    "other",
    [
        {**WEIGHTS, "a": WEIGHTS["a"].flip(0)},
        {**WEIGHTS, "a": WEIGHTS["a"].reshape(3, 2)},
        {**WEIGHTS, "b": WEIGHTS["b"].view(torch.float16)},
        {"c": WEIGHTS["a"], "b": WEIGHTS["b"]},
        {"a": WEIGHTS["a"]},
        {**WEIGHTS, "c": torch.zeros(1)},
    ],
    ids=["bytes", "shape", "dtype", "name", "one less", "one more"],
)
def test_other_weights_have_another_digest(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    assert digest(tmp_path / "one", WEIGHTS) != digest(tmp_path / "other", other)


def test_every_byte_counts(tmp_path: Path) -> None:
    """The bug: the digest was of samples, and these weights had the same one."""
    large = {"a": torch.zeros(100_000)}
    complete, found = digest(tmp_path / "0", large), set()
    for place in (1, 77_777, 99_999):
        other = {"a": large["a"].clone()}
        other["a"][place] = 1.0
        found.add(digest(tmp_path / str(place), other))
    assert len(found - {complete}) == 3


def test_the_digest_does_not_depend_on_files_and_metadata(tmp_path: Path) -> None:
    one = digest(tmp_path / "one", WEIGHTS)
    assert len(one) == 64
    assert digest(tmp_path / "two", {"b": WEIGHTS["b"]}, {"a": WEIGHTS["a"]}) == one
    assert digest(tmp_path / "three", WEIGHTS, metadata={"format": "pt", "by": "somebody"}) == one


def test_the_digest_of_large_weights_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_digest, "MIN_KEPT_BYTES", 1)
    folder, cache = saved(tmp_path / "model", WEIGHTS), tmp_path / "cache"
    real = weights_digest([folder], cache)
    (kept,) = (cache / KEPT).iterdir()
    assert kept.read_text() == real
    kept.write_text("0" * 64)
    assert weights_digest([folder], cache) == "0" * 64, "the kept digest was not used"
    file = folder / "model-0.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert weights_digest([folder], cache) == real
    for kept in (cache / KEPT).iterdir():
        kept.write_text("broken")
    assert weights_digest([folder], cache) == real


def test_small_weights_leave_nothing_and_a_cache_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, no_folder = saved(tmp_path / "model", WEIGHTS), tmp_path / "file"
    real = weights_digest([folder], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(weight_digest, "MIN_KEPT_BYTES", 1)
    no_folder.write_text("")
    assert weights_digest([folder], no_folder) == real


def test_the_thread_that_computes_the_digest_reports_broken_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", WEIGHTS)
    (folder / "model-0.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelLoadError, match="download it again"):
        start_weights_digest([folder], tmp_path).result(PATIENCE_S)


def test_a_file_of_the_hubs_cache_that_was_damaged_is_noticed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", WEIGHTS)
    file, blobs = folder / "model-0.safetensors", tmp_path / "blobs"
    blobs.mkdir()
    content = bytearray(file.read_bytes())
    blob = blobs / sha256(content).hexdigest()
    file.rename(blob)
    file.symlink_to(blob)
    assert len(weights_digest([folder], tmp_path / "cache")) == 64
    content[-1] ^= 1
    blob.write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"is damaged: its SHA-256 is not {blob.name}. Delete {blob}"):
        weights_digest([folder], tmp_path / "cache")
