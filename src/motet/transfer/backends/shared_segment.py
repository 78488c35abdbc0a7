"""A piece of memory that two processes of one user share: blocks pass through it from the owner to a reader.

    header   HEADER_BYTES   MAGIC, then the secret. Only processes of the same user can read it
    slot 0   SLOT_BYTES     bytes of a read, in the order in which the reader takes them
    slot 1   SLOT_BYTES
    ...

1. The reader creates a segment: a file of mode 0600 in memory (`/dev/shm`), or in the folder for temporary files.
2. The owner attaches it by its name. It accepts only a file of its own user, which no other user can open.
3. The reader unlinks the file. From then on, the memory has no name and is freed when both processes have ended.

If a reader is killed before step 3, the file stays. Its lock has ended with the reader, so `remove_abandoned`, which
every worker calls when it starts, finds and removes the file. On Windows the memory has a name but no file, and
the system frees it with the last process.
"""

import contextlib
import ctypes
import mmap
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

NUM_SLOTS = 4
SLOT_BYTES = 512 * 2**10
"""Size of a slot. Four slots fit into the second-level cache of many processors: the reader then copies from it."""
HEADER_BYTES = mmap.ALLOCATIONGRANULARITY
SEGMENT_BYTES = HEADER_BYTES + NUM_SLOTS * SLOT_BYTES

MAGIC = b"motet-kv-1\0\0\0\0\0\0"
SECRET_BYTES = 32
PREFIX = "motet-kv-"
NAME = re.compile(PREFIX + "[0-9a-f]{32}")
MEMORY_FOLDER = Path("/dev/shm")
"""Linux's folder for files in memory. A container's can be small or missing."""


class SharedSegment:
    """One process's view of a segment. `create` and `attach` make it; `close` ends it."""

    def __init__(self, name: str, mapping: mmap.mmap, *, path: Path | None) -> None:
        self.name = name
        self.secret = mapping[len(MAGIC) : len(MAGIC) + SECRET_BYTES]
        self._mapping = mapping
        self._path = path
        self._first: ctypes.c_char | None = ctypes.c_char.from_buffer(mapping)
        self._address = ctypes.addressof(self._first)

    @classmethod
    def create(cls) -> "SharedSegment":
        """Raises OSError if no folder has enough space."""
        name, header = PREFIX + secrets.token_hex(16), MAGIC + secrets.token_bytes(SECRET_BYTES)
        if sys.platform == "win32":
            mapping = mmap.mmap(-1, SEGMENT_BYTES, tagname=name)
            mapping[: len(header)] = header
            return cls(name, mapping, path=None)
        else:
            reasons = []
            for folder in segment_folders():
                try:
                    return cls(name, _create_file(folder / name, header), path=folder / name)
                except OSError as error:
                    reasons.append(f"{folder}: {error.strerror}")
            raise OSError(f"no memory can be shared ({'; '.join(reasons)})")

    @classmethod
    def attach(cls, name: str) -> "SharedSegment":
        """Returns the segment that another process of this user has created. Raises OSError."""
        if NAME.fullmatch(name) is None:
            raise OSError(f"{name[:80]!r} is not the name of a segment")
        mapping = _attach_file(name)
        if mapping[: len(MAGIC)] != MAGIC:
            mapping.close()
            raise OSError(f"{name} is not a segment of this version")
        return cls(name, mapping, path=None)

    def slot(self, number: int) -> int:
        """Returns the address of a slot; numbers continue after the last slot with the first one."""
        return self._address + HEADER_BYTES + number % NUM_SLOTS * SLOT_BYTES

    def unlink(self) -> None:
        """Removes the name of a segment that this process has created. A second call changes nothing."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def close(self) -> None:
        """Ends this process's view. Addresses of slots must not be used afterwards."""
        self.unlink()
        self._first = None
        self._mapping.close()


def remove_abandoned() -> None:
    """Removes the files of readers that were killed before they had unlinked them."""
    if sys.platform != "win32":
        for folder in segment_folders():
            with contextlib.suppress(OSError), os.scandir(folder) as entries:  # this user cannot list the folder
                for entry in entries:
                    if entry.name.startswith(PREFIX):
                        _remove_unlocked(entry)


def segment_folders() -> list[Path]:
    """Returns the folders that can have segments, the best one first."""
    folders = [MEMORY_FOLDER] if MEMORY_FOLDER.is_dir() else []
    with contextlib.suppress(FileNotFoundError):
        folders.append(Path(tempfile.gettempdir()))
    return folders


if sys.platform == "win32":

    def _attach_file(name: str) -> mmap.mmap:
        return mmap.mmap(-1, SEGMENT_BYTES, tagname=name)  # zeros, without MAGIC, if no process has it

else:

    def _create_file(path: Path, header: bytes) -> mmap.mmap:
        """Returns the memory of a new file, which keeps its lock until the memory is closed."""
        while True:
            with _opened(path, os.O_CREAT | os.O_EXCL) as descriptor:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    content = memoryview(header.ljust(SEGMENT_BYTES, b"\0"))  # no page can be missing later
                    while content:
                        content = content[os.write(descriptor, content) :]
                    if os.fstat(descriptor).st_nlink:  # `remove_abandoned` can have been faster than the lock
                        return mmap.mmap(descriptor, SEGMENT_BYTES)  # duplicates the descriptor
                except OSError:
                    path.unlink(missing_ok=True)
                    raise

    def _remove_unlocked(entry: "os.DirEntry[str]") -> None:
        """Removes a file of this user that has no lock. Other users can make any number of files with such names."""
        with contextlib.suppress(OSError):  # it has a lock, or is gone
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                with _opened(Path(entry.path)) as descriptor:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)

    def _attach_file(name: str) -> mmap.mmap:
        for folder in segment_folders():
            with contextlib.suppress(FileNotFoundError), _opened(folder / name) as descriptor:
                facts = os.fstat(descriptor)
                private = facts.st_uid == os.geteuid() and not facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
                if not stat.S_ISREG(facts.st_mode) or not private or facts.st_size != SEGMENT_BYTES:
                    raise OSError(f"{folder / name} is not a segment of this user")
                return mmap.mmap(descriptor, SEGMENT_BYTES)
        raise OSError(f"there is no {name} in {', '.join(map(str, segment_folders()))}")

    @contextlib.contextmanager
    def _opened(path: Path, flags: int = 0) -> Iterator[int]:
        """Opens a regular file for reading and writing. Neither follows a link, nor waits for the end of a pipe."""
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
