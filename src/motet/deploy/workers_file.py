"""A file that names the workers of a gateway, one a line; read again whenever it changes."""

import asyncio
import logging
from pathlib import Path

from motet.errors import ConfigError
from motet.settings.named_worker import NamedWorker, named_workers

logger = logging.getLogger(__name__)


class WorkersFile:
    """`URL` or `URL,role` a line; what stands behind a `#` is not read.

    A line that is broken is logged and passed over; a file that cannot be read any more names whom it named last."""

    def __init__(self, path: Path, *, period_s: float = 1.0) -> None:
        """`period_s`: between two looks. Raises ConfigError if it cannot be read."""
        self._path = path
        self._period_s = period_s
        self._stamp: tuple[int, int, int] | None = None
        self._named: tuple[NamedWorker, ...] = ()
        self._missing = False
        try:
            self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--workers-file {path}: cannot be read: {error}") from error

    @property
    def named(self) -> tuple[NamedWorker, ...]:
        """Whom it named when it was read last."""
        return self._named

    async def next(self) -> tuple[NamedWorker, ...]:
        await asyncio.sleep(self._period_s)
        return await asyncio.to_thread(self.look)

    def look(self) -> tuple[NamedWorker, ...]:
        """Whom it names now."""
        try:
            self._read()
        except (OSError, UnicodeDecodeError) as error:
            if not self._missing:
                logger.error("%s: cannot be read, the workers stay as they are: %s", self._path, error)
            self._missing = True
        else:
            self._missing = False
        return self._named

    def _read(self) -> None:
        status = self._path.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp != self._stamp:
            self._named = tuple(self._workers_in(self._path.read_text(encoding="utf-8")))
            self._stamp = stamp

    def _workers_in(self, text: str) -> list[NamedWorker]:
        by_url: dict[str, NamedWorker] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                for worker in named_workers(filter(None, [line.partition("#")[0].strip()])):
                    by_url.setdefault(worker.url, worker)
            except ConfigError as error:
                logger.error("%s, line %d: %s; the line is passed over", self._path, number, error.message)
        return list(by_url.values())
