"""Reports the slow stages of getting a model: downloads, with their bytes, and other work.

`Lines` prints lines, for pipes and logs. `progress_bars` shows bars and spinners on a terminal."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

WATCH_INTERVAL_S = 0.1
LINE_INTERVAL_S = 10.0
"""Minimum time in seconds between two lines about the same stage."""

Say = Callable[[str], None]
"""Prints one line."""


class Progress(Protocol):
    """Reports stages to the user."""

    def say(self, line: str) -> None:
        """Reports something that takes no time."""

    def stage(
        self, label: str, total_bytes: int | None = None
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Reports that a stage is running while the context is entered. The function takes the number of bytes that
        are done; a stage without `total_bytes` does not use it."""


class Lines:
    """Prints a line when a stage starts, and for long downloads also from time to time."""

    def __init__(self, say: Say, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say
        self._clock = clock

    @contextlib.contextmanager
    def stage(self, label: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
        self.say(label if total_bytes is None else f"{label} ({size_text(total_bytes)})")
        last_s = self._clock()

        def report(done_bytes: int) -> None:
            nonlocal last_s
            if total_bytes and (now_s := self._clock()) >= last_s + LINE_INTERVAL_S:
                last_s = now_s
                self.say(f"{label}: {size_text(done_bytes)} of {size_text(total_bytes)}")

        yield report


def silent(line: str) -> None:
    """A `Say` that prints nothing."""


SILENT = Lines(silent)


def size_text(num_bytes: int) -> str:
    """Returns a size with a unit: `6.6 MB`, `93 MB`, `1.24 GB`."""
    if num_bytes < 10**6:
        return f"{num_bytes / 10**3:.0f} kB"
    if num_bytes < 10**9:
        return f"{num_bytes / 10**6:.{1 if num_bytes < 10**7 else 0}f} MB"
    return f"{num_bytes / 10**9:.2f} GB"


@contextlib.contextmanager
def watched(folder: Path, report: Callable[[int], None], *, less_bytes: int = 0) -> Iterator[None]:
    """Reports the size of the files in a folder, less `less_bytes`, while the context is entered. Works with every
    program that downloads to the folder, whatever that program prints."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(WATCH_INTERVAL_S):
            report(max(0, folder_bytes(folder) - less_bytes))

    thread = threading.Thread(target=watch, name="watch-download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def folder_bytes(folder: Path) -> int:
    """Returns the bytes on disk of all files in a folder. Files can disappear while they are counted."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if file.is_file() and not file.is_symlink():
                stat = file.stat()
                # A file to which several threads write has holes.
                total += min(stat.st_size, getattr(stat, "st_blocks", stat.st_size) * 512)
    return total
