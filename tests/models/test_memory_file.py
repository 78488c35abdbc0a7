"""Files in memory: every reader of a complete file reads the same."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from motet.errors import ModelLoadError
from motet.models import memory_file
from motet.models.memory_file import FOLDER_PREFIX, MemoryFile, remove_abandoned_folders
from motet.system.machine import read_memory
from tests.memory_files import memory_file_of

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


def is_open(file: MemoryFile) -> bool:
    return file.path.exists()


def test_another_process_reads_a_sealed_file_that_its_maker_closes() -> None:
    made = memory_file_of(save(TENSORS))
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
    file = memory_file_of(b"abc")
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
        MemoryFile.create(read_memory().available_bytes * 2)
    assert os.listdir("/proc/self/fd") == before


HIDDEN = ("memfd_create", "posix_fallocate")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files on a system that has no files in memory."""
    for name in HIDDEN:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(memory_file, "fcntl", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folders(temporary: Path) -> list[Path]:
    return [*temporary.glob(f"{FOLDER_PREFIX}*")]


def public_folder(temporary: Path, target: Path) -> Path:
    """Makes a folder as another user of the machine can, with a link in place of the weights."""
    folder = temporary / f"{FOLDER_PREFIX}public"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "lock").touch()
    (folder / "weights.safetensors").symlink_to(target)
    return folder


def test_folders_of_other_users_are_not_removed_and_their_links_not_followed(temporary: Path) -> None:
    """The bug: starting a server set the mode 0600 on any file of this user to which another user had made a link."""
    (target := temporary / "program").touch()
    target.chmod(0o755)
    public = public_folder(temporary, target)
    (private := temporary / "private").mkdir(mode=0o700)
    (private / "lock").touch()
    (link := temporary / f"{FOLDER_PREFIX}link").symlink_to(private)
    if os.geteuid() == 0:
        os.chown(foreign := public.rename(temporary / f"{FOLDER_PREFIX}foreign"), 65534, 65534)
        foreign.chmod(0o700)
        public = foreign
    remove_abandoned_folders()
    assert target.stat().st_mode & 0o777 == 0o755
    assert sorted(folders(temporary)) == sorted([public, link])
    assert {path.name for path in public.iterdir()} == {"lock", "weights.safetensors"}


def test_without_files_in_memory_a_reader_keeps_a_temporary_file_that_its_maker_removes(temporary: Path) -> None:
    made = memory_file_of(save(TENSORS))
    assert (made.path.stat().st_mode & 0o777, made.path.parent.stat().st_mode & 0o777) == (0o400, 0o700)
    opened = MemoryFile.opened(made.path)
    made.close()
    made.close()
    assert not is_open(made) and folders(temporary) == [opened.path.parent]
    with safe_open(opened.path, framework="pt") as tensors:
        assert all(torch.equal(tensors.get_tensor(name), tensor) for name, tensor in TENSORS.items())
    opened.close()
    assert folders(temporary) == []


def test_only_complete_temporary_files_of_motet_are_opened(temporary: Path) -> None:
    unfinished, elsewhere = MemoryFile.create(3), temporary / "weights.safetensors"
    elsewhere.write_bytes(b"abc")
    (link := temporary / f"{FOLDER_PREFIX}link").mkdir(mode=0o700)
    (link / "weights.safetensors").symlink_to(elsewhere)
    public = public_folder(temporary, elsewhere)
    for path, why in (
        (elsewhere, "is not a file in memory: its name would be"),
        (Path("/proc/self/fd/0"), "is not a file in memory"),
        (unfinished.path, "is not a complete file"),
        (link / "weights.safetensors", "is not a complete file"),
        (public / "weights.safetensors", "is not a folder that only this user can open"),
        (temporary / f"{FOLDER_PREFIX}none" / "weights.safetensors", "cannot be opened: No such file"),
    ):
        with pytest.raises(ModelLoadError, match=why):
            MemoryFile.opened(path)
    unfinished.close()
    assert sorted(folders(temporary)) == [link, public]


def test_a_temporary_file_is_not_made_without_space_for_it(temporary: Path) -> None:
    with pytest.raises(OSError, match="bytes of the disk are free"):
        MemoryFile.create(2**60)
    assert folders(temporary) == []


@pytest.mark.slow
def test_the_file_of_a_killed_process_is_removed_by_the_next_one(temporary: Path) -> None:
    code = f"""
import os, tempfile
tempfile.tempdir = {str(temporary)!r}
for name in {HIDDEN}:
    delattr(os, name)
from motet.models.memory_file import MemoryFile
kept = MemoryFile.create(3)
print(flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        remove_abandoned_folders()
        assert len(folders(temporary)) == 1, "its process lives"
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    kept = MemoryFile.create(1)
    assert folders(temporary) == [kept.path.parent]
    kept.close()


def test_a_container_can_forbid_files_in_memory_or_hide_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def forbid(name: str, flags: int) -> int:
        raise PermissionError("seccomp")

    def hidden(descriptor: int) -> Path:
        return Path("/proc/hidden")

    before = os.listdir("/proc/self/fd")
    for owner, name, replaced in ((os, "memfd_create", forbid), (memory_file, "_opened_as", hidden)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replaced)
            file = memory_file_of(b"abc")
            assert file.path.read_bytes() == b"abc" and file.path.is_relative_to(tmp_path)
            file.close()
    assert os.listdir("/proc/self/fd") == before
