"""Files in memory: every reader of a sealed file reads the same, and no process can change it."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from motet.errors import ModelLoadError
from motet.models.checkpoint import Checkpoint, MemoryFile, available_bytes, checkpoint_files
from motet.models.folder import check_safetensors
from motet.models.weight_digest import weights_digest

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


def in_memory(data: bytes) -> MemoryFile:
    file = MemoryFile.create(len(data))
    assert file.write(data, 0) == len(data)
    file.seal()
    return file


def is_open(file: MemoryFile) -> bool:
    return file.path.exists()


def test_another_process_reads_a_sealed_file_that_its_maker_closes() -> None:
    made = in_memory(save(TENSORS))
    opened = MemoryFile.opened(made.path)
    made.close()
    code = f"print(len(open({str(opened.path)!r}, 'rb').read()))"
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(read.stdout) == opened.path.stat().st_size == len(save(TENSORS))
    with safe_open(opened.path, framework="pt") as tensors:
        assert all(torch.equal(tensors.get_tensor(name), tensor) for name, tensor in TENSORS.items())
    opened.close()
    assert not is_open(made) and not is_open(opened)


def test_a_sealed_file_is_neither_written_nor_cut_nor_made_longer() -> None:
    file = in_memory(b"abc")
    for flags in (os.O_RDONLY, os.O_RDWR):
        descriptor = os.open(file.path, flags)
        for change in (
            lambda one: os.pwrite(one, b"x", 0),
            lambda one: os.ftruncate(one, 1),
            lambda one: os.ftruncate(one, 9),
            lambda one: mmap.mmap(one, 3),
        ):
            with pytest.raises(OSError):
                change(descriptor)
        os.close(descriptor)
    assert file.path.read_bytes() == b"abc"
    file.close()


def test_only_sealed_files_in_memory_are_opened(tmp_path: Path) -> None:
    on_disk = tmp_path / "model.safetensors"
    on_disk.write_bytes(b"abc")
    unsealed = MemoryFile.create(3)
    with on_disk.open("rb") as disk:
        for path, why in (
            (on_disk, "is not a file in memory"),
            (Path("/proc/self/fd/0"), "is not a file in memory"),
            (Path(f"/proc/{os.getpid()}/fd/{disk.fileno()}"), "sealed"),
            (unsealed.path, "sealed"),
            (Path("/proc/1/fd/99999"), "cannot be opened"),
        ):
            with pytest.raises(ModelLoadError, match=why):
                MemoryFile.opened(path)
    unsealed.close()
    unsealed.close()


def test_a_file_is_not_made_without_memory_for_it() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="bytes of memory are free"):
        MemoryFile.create(available_bytes() * 2)
    assert os.listdir("/proc/self/fd") == before


def test_a_checkpoint_in_memory_has_the_digest_of_a_folder_with_the_same_tensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(save(TENSORS))
    pieces = [in_memory(save({name: tensor})) for name, tensor in TENSORS.items()]
    checkpoint = Checkpoint.of_memory(pieces)
    assert checkpoint_files(checkpoint.paths) == [piece.path for piece in pieces]
    assert check_safetensors(pieces[0].path)[0].keys() == {"a"}
    assert weights_digest(checkpoint.paths, None) == weights_digest([tmp_path], None)
    assert (checkpoint.name, Checkpoint.of(tmp_path).name) == ("memory", str(tmp_path))
    checkpoint.close()
    assert not any(map(is_open, pieces))
