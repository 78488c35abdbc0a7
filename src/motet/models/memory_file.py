"""Files with weights for other processes of the same user on this machine.

Linux               in memory (memfd), in no folder. Processes open it as `/proc/PID/fd/FD`, and it exists while a
                    process has it open. A complete file is sealed: no process can write to it or truncate it, so
                    all readers read the same data
no memfd or /proc   (macOS, Windows, a container that forbids them) in a folder of its own among the system's
                    temporary files, which only this user can open. A complete file is read-only, but a program of
                    the same user could still change it. The weights take space on the disk, and writing them takes
                    longer. `close` removes the folder. If its process is killed, the next process that makes such
                    a file, or the next server, removes it"""

import contextlib
import errno
import importlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from motet.errors import ModelLoadError
from motet.models.regular_files import open_regular
from motet.system.machine import read_memory

MEMORY_FILE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
MEMORY_FILE_FLAGS = sum(getattr(os, name, 0) for name in ("MFD_CLOEXEC", "MFD_ALLOW_SEALING"))
FOLDER_PREFIX = "motet-weights-"
FILE_NAME = "weights.safetensors"
LOCK_NAME = "lock"

fcntl: Any
"""The module that seals files. None on Windows."""
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:
    fcntl = None


def write_all(descriptor: int, data: bytes | memoryview, *, at: int) -> int:
    """Writes all of `data` to an open file from offset `at` on, and returns the offset after it."""
    left = memoryview(data)
    os.lseek(descriptor, at, os.SEEK_SET)
    while left:
        written = os.write(descriptor, left)
        left, at = left[written:], at + written
    return at


def is_memory_file(path: Path) -> bool:
    """Returns True if a path has the form of `MemoryFile.path`, of this or another process."""
    in_folder = path.name == FILE_NAME and path.parent.name.startswith(FOLDER_PREFIX)
    return MEMORY_FILE.fullmatch(str(path)) is not None or (in_folder and path.parent.parent == _temporary_files())


class MemoryFile:
    """A file that other processes can open until this process calls `close`."""

    def __init__(self, path: Path, descriptor: int = -1, *, folder: "TemporaryFolder | None" = None) -> None:
        self.path = path
        """The name under which processes of the same user can open it."""
        self._descriptor = descriptor
        """-1 if this process does not have the file open."""
        self._folder = folder
        """The folder of the file; None for a file in memory."""
        self.on_settled: Callable[[], None] | None = None
        """Called once, by `settle`."""

    @classmethod
    def create(cls, num_bytes: int) -> "MemoryFile":
        """Returns a file of zeros whose memory is allocated. Raises OSError if there is too little memory or disk
        space."""
        file = cls._in_memory(num_bytes) or cls._in_folder(num_bytes)
        try:
            file.allocate(num_bytes)
        except BaseException:
            file.close()
            raise
        return file

    def allocate(self, num_bytes: int) -> None:
        if hasattr(os, "posix_fallocate"):  # ten times as fast as page by page
            os.posix_fallocate(self._descriptor, 0, max(1, num_bytes))
        os.ftruncate(self._descriptor, num_bytes)

    @classmethod
    def _in_memory(cls, num_bytes: int) -> "MemoryFile | None":
        """Returns a file in memory; None if this system has none, or no name for it."""
        if fcntl is None or not hasattr(os, "memfd_create"):
            return None
        if num_bytes > (free := read_memory().available_bytes):
            raise OSError(errno.ENOMEM, f"{num_bytes} bytes are needed, and {free} bytes of memory are free")
        try:
            descriptor = os.memfd_create("motet-weights", MEMORY_FILE_FLAGS)
        except OSError:  # a container forbids it, for example
            return None
        file = cls(_opened_as(descriptor), descriptor)
        if file.path.exists():
            return file
        file.close()
        return None

    @classmethod
    def _in_folder(cls, num_bytes: int) -> "MemoryFile":
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if num_bytes > free:
            raise OSError(errno.ENOSPC, f"{num_bytes} bytes are needed, and {free} bytes of the disk are free")
        folder = TemporaryFolder()
        try:
            path = folder.path / FILE_NAME
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            return cls(path, os.open(path, flags, 0o600), folder=folder)
        except BaseException:
            folder.close()
            raise

    @classmethod
    def opened(cls, path: Path) -> "MemoryFile":
        """Opens the file of another process, which can close it then. Raises ModelLoadError unless it is complete."""
        if MEMORY_FILE.fullmatch(str(path)) is not None and fcntl is not None:
            return cls._opened_in_memory(path)
        folder = path.parent
        if path.name == FILE_NAME and folder.name.startswith(FOLDER_PREFIX) and folder.parent == _temporary_files():
            return cls._opened_in_folder(path)
        names = f"/proc/PID/fd/FD, or {_temporary_files() / (FOLDER_PREFIX + '*') / FILE_NAME}"
        raise ModelLoadError(f"{path} is not a file in memory: its name would be {names}")

    @classmethod
    def _opened_in_memory(cls, path: Path) -> "MemoryFile":
        try:
            with open_regular(path) as opened:
                descriptor = os.dup(opened.fileno())
        except OSError as exc:
            raise ModelLoadError(f"{path} cannot be opened: {exc.strerror}") from exc
        with contextlib.suppress(OSError):  # a file of another kind has no seals
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals():
                return cls(_opened_as(descriptor), descriptor)
        os.close(descriptor)
        raise ModelLoadError(f"{path} is not a file in memory that is sealed against writing and truncation")

    @classmethod
    def _opened_in_folder(cls, path: Path) -> "MemoryFile":
        """Makes a hard link in a folder of this process, so that the file remains when its maker removes its folder."""
        folder = TemporaryFolder()
        try:
            if not _is_private(path.parent):
                raise ModelLoadError(f"{path.parent} is not a folder that only this user can open")
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
                raise ModelLoadError(f"{path} is not a complete file: it would be read-only")
            os.link(path, folder.path / FILE_NAME)
        except OSError as exc:
            folder.close()
            raise ModelLoadError(f"{path} cannot be opened: {exc.strerror}") from exc
        except ModelLoadError:
            folder.close()
            raise
        return cls(folder.path / FILE_NAME, folder=folder)

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    def write(self, data: bytes | memoryview, at: int) -> int:
        """Writes all of `data`, and returns the offset after it."""
        return write_all(self._descriptor, data, at=at)

    def seal(self) -> None:
        """Called when the file is complete."""
        if self._folder is None:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals())
        else:
            self.path.chmod(stat.S_IRUSR)

    def settle(self) -> None:
        """Called when the weights of the file serve, or when the file is closed. Can be called twice."""
        settled, self.on_settled = self.on_settled, None
        if settled is not None:
            settled()

    def close(self) -> None:
        """Closes the file. Can be called twice."""
        self.settle()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._folder is not None:
            self._folder.close()


class TemporaryFolder:
    """A folder that only this user can open, until `close`. As long as its process lives, its lock is taken."""

    def __init__(self) -> None:
        remove_abandoned_folders()
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=_temporary_files()))
        self._lock = FileLock(self.path / LOCK_NAME, thread_local=False)
        self._lock.acquire()

    def close(self) -> None:
        """Removes the folder. Can be called twice."""
        self._lock.release()
        _remove(self.path)


def remove_abandoned_folders() -> None:
    """Removes the folders of this user's processes that were killed."""
    for folder in _temporary_files().glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # TimeoutError: its process lives
            if not _is_private(folder) or not (folder / LOCK_NAME).exists():
                continue
            with FileLock(folder / LOCK_NAME, timeout=0):
                pass
            _remove(folder)


def _is_private(folder: Path) -> bool:
    """Returns True if `folder` is a folder, not a link, that only this user can open. Every user of the machine can
    create folders and links in the folder for temporary files. Raises FileNotFoundError if it does not exist."""
    facts = folder.lstat()
    if not hasattr(os, "geteuid"):  # Windows: each user has a folder for temporary files
        return stat.S_ISDIR(facts.st_mode)
    others = facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not others


def _remove(folder: Path) -> None:
    """Removes a folder as far as the system permits: on Windows, a file that a process reads stays until later."""
    with contextlib.suppress(OSError):
        (folder / FILE_NAME).chmod(stat.S_IRUSR | stat.S_IWUSR)  # Windows does not remove read-only files
    shutil.rmtree(folder, ignore_errors=True)


def _temporary_files() -> Path:
    return Path(tempfile.gettempdir()).resolve()


def _opened_as(descriptor: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def _seals() -> int:
    return int(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
