"""Lists of workers that can change while a gateway runs, such as a file, and the workers that came from such a list."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from motet.errors import ConfigError
from motet.settings.named_worker import NamedWorker, named_workers

logger = logging.getLogger(__name__)


class WorkerList(Protocol):
    """A list of workers that can change (`WorkersFile`, `deploy.ray.directory.ListedWorkers`)."""

    @property
    def named(self) -> Sequence[NamedWorker]:
        """The workers of the last list."""
        ...

    async def next(self) -> Sequence[NamedWorker]:
        """Waits for the next list of workers, which can be unchanged. Can be cancelled."""
        ...


class WorkersFile:
    """A file that names workers, `URL` or `URL,role` on each line, with comments after `#`.

    Malformed lines are logged and skipped. A file that can no longer be read counts as unchanged."""

    def __init__(self, path: Path, *, period_s: float = 1.0) -> None:
        """`period_s`: time between two checks of the file. Raises ConfigError if it cannot be read."""
        self.named: tuple[NamedWorker, ...] = ()
        self._path = path
        self._period_s = period_s
        self._stamp: tuple[int, int, int] | None = None
        """Time of change, size and inode when the file was last read; None if it could not be read."""
        self._missing = False
        if problem := self._read():
            raise ConfigError(f"--workers-file {path}: cannot be read: {problem}")

    async def next(self) -> tuple[NamedWorker, ...]:
        await asyncio.sleep(self._period_s)
        return await asyncio.to_thread(self.check)

    def check(self) -> tuple[NamedWorker, ...]:
        """Returns the workers that the file names now."""
        problem = self._read()
        if problem and not self._missing:
            logger.error("%s: cannot be read, the workers stay as they are: %s", self._path, problem)
        self._missing = problem is not None
        return self.named

    def _read(self) -> Exception | None:
        """Reads the file if it has changed. Returns the error if it cannot be read."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                self.named = tuple(self._workers_in(self._path.read_text(encoding="utf-8")))
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            self._stamp = None  # when the file is back it is read, even if its stamp is the same
            return error
        return None

    def _workers_in(self, text: str) -> list[NamedWorker]:
        by_url: dict[str, NamedWorker] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                for worker in named_workers(filter(None, [line.partition("#")[0].strip()])):
                    by_url.setdefault(worker.url, worker)
            except ConfigError as error:
                logger.error("%s, line %d: %s; the line is skipped", self._path, number, error.message)
        return list(by_url.values())


class WorkersFromList:
    """The workers of a gateway that came from its list.

    Each URL of the list is processed once: if an operator removes its worker, it does not come back. The list cannot
    remove workers that operators added."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        """Ids by URL, for workers that came from the list and stay."""
        self._processed: set[str] = set()
        """URLs of the list that have been processed."""

    def removed(self, named: Iterable[NamedWorker]) -> list[str]:
        """Returns the ids of workers that the new list does not contain any more."""
        urls = {worker.url for worker in named}
        return [id for url, id in self._ids.items() if url not in urls]

    def added(
        self, named: Iterable[NamedWorker], ids: Mapping[str, str], *, leaving: Collection[str]
    ) -> list[NamedWorker]:
        """Returns the workers of the new list that must be added. `ids`: ids of all present workers by URL; `leaving`:
        ids of those that are leaving, whose URLs are processed when they have left."""
        by_url = {worker.url: worker for worker in named}
        self._processed &= by_url.keys()
        self._processed |= {url for url in by_url.keys() & ids.keys() if ids[url] not in leaving}
        return [worker for url, worker in by_url.items() if url not in self._processed and url not in ids]

    def note(self, url: str, id: str) -> None:
        """Called when a worker of the list has been added."""
        self._ids[url] = id
        self._processed.add(url)

    def forget(self, url: str) -> None:
        """Called when a worker starts to leave."""
        self._ids.pop(url, None)
