"""The folder of `--batch-dir`, used in a single thread (`store.BatchStore`):

    batches.sqlite   records of files and batches (WAL). The open database is the lock of the folder
    files/ID         contents of files, also of the outputs of batches that run
    files/ID.part    an upload that has not ended; removed at the start

Names in the folder are ids that the server generates. A client's id is only ever compared with ids in the database."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from motet.api.batches.records import BatchRecord, FilePurpose, FileRecord
from motet.api.batches.tables import SCHEMA, BatchTable, FileTable
from motet.batch.line_file import LineFile
from motet.errors import ConfigError

DATABASE, FILES, PART = "batches.sqlite", "files", ".part"
VERSION = 1
"""Form of the database. A server refuses a folder of another form."""
PRIVATE = 0o600
"""Mode of files that only the server's user can read."""


class BatchFolder:
    """The records and contents. All methods block, and must be called in the thread that made the object."""

    def __init__(self, folder: Path) -> None:
        """Creates or opens the folder. Raises ConfigError if it cannot be used, or another server uses it."""
        self._contents = folder / FILES
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._contents.mkdir(mode=0o700, exist_ok=True)
            os.close(_private(str(folder / DATABASE), os.O_RDWR | os.O_CREAT))  # SQLite's other files get its mode
            self._database = sqlite3.connect(folder / DATABASE, timeout=0, isolation_level=None)
            try:
                self._open(folder)
                self.files, self.batches = FileTable(self._database), BatchTable(self._database)
                self._remove_abandoned()
            except BaseException:
                self._database.close()
                raise
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise ConfigError(f"--batch-dir {folder}: another server uses it; give each server its own") from error
            raise ConfigError(f"--batch-dir {folder}: it cannot be used: {error}") from error

    def _open(self, folder: Path) -> None:
        execute = self._database.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute("BEGIN EXCLUSIVE")  # takes the lock, which the process holds until it ends
        execute("COMMIT")
        (version,) = execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            why = f"it has the form {version} of another version of Motet, not {VERSION}; choose another folder"
            raise ConfigError(f"--batch-dir {folder}: {why}")
        self._database.executescript(SCHEMA)
        execute(f"PRAGMA user_version = {VERSION}")

    def _remove_abandoned(self) -> None:
        """Removes contents without a record, which a killed server left."""
        unfinished = self.batches.unfinished()
        known = self.files.ids() | {id for batch in unfinished for id in (batch.output_id, batch.error_id)}
        with os.scandir(self._contents) as entries:
            for entry in entries:
                if entry.name not in known:
                    os.unlink(entry.path)

    def close(self) -> None:
        self._database.close()

    def path(self, id: str) -> Path:
        """Returns the path of a file's content. `id`: from a record."""
        return self._contents / id

    def start_upload(self, id: str) -> BinaryIO:
        """Opens the content of a new file. `add_file` or `drop_upload` ends the upload."""
        return open(self._part(id), "xb", opener=_private)

    def drop_upload(self, id: str) -> None:
        self._part(id).unlink(missing_ok=True)

    def add_file(self, record: FileRecord) -> None:
        """Adds an uploaded file, whose content is complete and closed."""
        os.replace(self._part(record.id), self.path(record.id))
        sync_folder(self._contents)
        self.files.insert(record)

    def open_results(self, id: str) -> LineFile:
        """Opens or creates the output or error file of a batch that runs. The caller closes it."""
        return LineFile(self.path(id), mode=PRIVATE)

    def delete_file(self, id: str) -> bool:
        """Deletes a file. Returns False if it was deleted before."""
        deleted = self.files.delete(id)
        self.path(id).unlink(missing_ok=True)
        return deleted

    def add_batch(self, record: BatchRecord, *, now_s: float) -> bool:
        """Adds a batch. Returns False if its owner has no such file for batches."""
        file = self.files.find(record.input_id, owner=record.owner, now_s=now_s)
        if file is None or file.purpose is not FilePurpose.BATCH:
            return False
        with self._transaction():
            self.batches.insert(record)
        return True

    def save_batch(self, record: BatchRecord, *files: FileRecord) -> None:
        """Stores a changed batch and, together with it, the files that clients can see from now on."""
        with self._transaction():
            for file in files:
                self.files.insert(file)
            self.batches.update(record)

    def remove_expired(self, now_s: float, *, keep_s: float) -> Sequence[tuple[str, str, int]]:
        """Removes expired files, and batches that ended more than `keep_s` ago. Returns id, owner and bytes of each
        file."""
        expired = self.files.expired(now_s)
        for id, _, _ in expired:
            self.delete_file(id)
        self.batches.remove_ended(now_s - keep_s)
        return expired

    def usage(self) -> Sequence[tuple[str, int, int]]:
        """Returns owners with numbers of files and their bytes, also for the results of unfinished batches."""
        used = [*self.files.usage()]
        for batch in self.batches.unfinished():
            for id in (batch.output_id, batch.error_id):
                with contextlib.suppress(FileNotFoundError):
                    used.append((batch.owner, 0, self.path(id).stat().st_size))
        return used

    def _part(self, id: str) -> Path:
        return self._contents / f"{id}{PART}"

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def close_durable(content: BinaryIO) -> None:
    """Closes a file whose content must survive a loss of power."""
    content.flush()
    os.fsync(content.fileno())
    content.close()


def output_record(batch: BatchRecord, *, errors: bool, num_bytes: int, now_s: float, keep_s: int) -> FileRecord:
    """Returns the record of a batch's output or error file. `keep_s`: the server's setting."""
    return FileRecord(
        id=batch.error_id if errors else batch.output_id,
        owner=batch.owner,
        num_bytes=num_bytes,
        created_s=int(now_s),
        expires_s=int(now_s) + min(keep_s, batch.output_keep_s or keep_s),
        filename=f"{batch.id}_{'error' if errors else 'output'}.jsonl",
        purpose=FilePurpose.BATCH_OUTPUT,
    )


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where the system can."""
    with contextlib.suppress(OSError):  # on Windows a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)
