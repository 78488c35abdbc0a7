"""The tables of the database: the records of files and of batches. All methods block."""

import sqlite3
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from motet.api.batches.records import BatchRecord, FileRecord

LAST = 2**63 - 1
"""A number greater than the numbers of all records."""
MAX_ENDED = 10_000
"""Maximum number of ended batches of an owner. The oldest ones are removed."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    expires_s INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, number);
CREATE INDEX IF NOT EXISTS files_by_expiry ON files (expires_s);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    input_id TEXT NOT NULL,
    ended_s INTEGER,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, number);
CREATE INDEX IF NOT EXISTS open_batches ON batches (input_id) WHERE ended_s IS NULL;
CREATE INDEX IF NOT EXISTS ended_batches ON batches (ended_s) WHERE ended_s IS NOT NULL;
"""

Record = TypeVar("Record", FileRecord, BatchRecord)


class FileTable:
    """The records of complete files, in the order in which they were added."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def insert(self, record: FileRecord) -> None:
        query = "INSERT INTO files (id, owner, purpose, bytes, expires_s, record) VALUES (?, ?, ?, ?, ?, ?)"
        encoded = msgspec.json.encode(record)
        values = (record.id, record.owner, record.purpose.value, record.num_bytes, record.expires_s, encoded)
        self._database.execute(query, values)

    def delete(self, id: str) -> bool:
        """Deletes a record. Returns False if it was deleted before."""
        return self._database.execute("DELETE FROM files WHERE id = ?", (id,)).rowcount > 0

    def find(self, id: str, *, owner: str, now_s: float) -> FileRecord | None:
        """Returns an owner's file; None if it does not exist or has expired."""
        query = "SELECT record FROM files WHERE id = ? AND owner = ? AND expires_s > ?"
        return _first(self._database.execute(query, (id, owner, int(now_s))), FileRecord)

    def page(
        self, owner: str, *, after: str | None, limit: int, ascending: bool, purpose: str | None, now_s: float
    ) -> Sequence[FileRecord] | None:
        """Returns at most `limit` files; None if the owner has no file with the id `after`."""
        number = 0 if ascending else LAST
        if after is not None:
            found = self._database.execute("SELECT number FROM files WHERE id = ? AND owner = ?", (after, owner))
            if (row := found.fetchone()) is None:
                return None
            number = row[0]
        order, compared = ("ASC", ">") if ascending else ("DESC", "<")
        query = (
            f"SELECT record FROM files WHERE owner = ? AND number {compared} ? AND expires_s > ? "
            f"AND (? IS NULL OR purpose = ?) ORDER BY number {order} LIMIT ?"
        )
        return _all(self._database.execute(query, (owner, number, int(now_s), purpose, purpose, limit)), FileRecord)

    def expired(self, now_s: float) -> Sequence[tuple[str, str, int]]:
        """Returns id, owner and bytes of up to 1000 expired files that no unfinished batch reads."""
        query = (
            "SELECT id, owner, bytes FROM files WHERE expires_s <= ? "
            "AND id NOT IN (SELECT input_id FROM batches WHERE ended_s IS NULL) LIMIT 1000"
        )
        return self._database.execute(query, (int(now_s),)).fetchall()

    def usage(self) -> Sequence[tuple[str, int, int]]:
        """Returns each owner with its number of files and their bytes."""
        return self._database.execute("SELECT owner, COUNT(*), SUM(bytes) FROM files GROUP BY owner").fetchall()

    def ids(self) -> set[str]:
        return {id for (id,) in self._database.execute("SELECT id FROM files")}


class BatchTable:
    """The records of batches, in the order in which they were created."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def insert(self, record: BatchRecord) -> None:
        """Adds a batch, and removes the oldest ended batches of its owner if there are too many."""
        query = "INSERT INTO batches (id, owner, input_id, record) VALUES (?, ?, ?, ?)"
        self._database.execute(query, (record.id, record.owner, record.input_id, msgspec.json.encode(record)))
        query = (
            "DELETE FROM batches WHERE number IN (SELECT number FROM batches WHERE owner = ? AND ended_s IS NOT NULL "
            "ORDER BY number DESC LIMIT -1 OFFSET ?)"
        )
        self._database.execute(query, (record.owner, MAX_ENDED))

    def update(self, record: BatchRecord) -> None:
        ended_s = max(record.times_s.values()) if record.ended else None
        query = "UPDATE batches SET record = ?, ended_s = ? WHERE id = ?"
        self._database.execute(query, (msgspec.json.encode(record), ended_s, record.id))

    def find(self, id: str, *, owner: str) -> BatchRecord | None:
        query = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        return _first(self._database.execute(query, (id, owner)), BatchRecord)

    def page(self, owner: str, *, after: str | None, limit: int) -> Sequence[BatchRecord] | None:
        """Returns at most `limit` batches, the newest first; None if the owner has no batch with the id `after`."""
        number = LAST
        if after is not None:
            found = self._database.execute("SELECT number FROM batches WHERE id = ? AND owner = ?", (after, owner))
            if (row := found.fetchone()) is None:
                return None
            number = row[0]
        query = "SELECT record FROM batches WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?"
        return _all(self._database.execute(query, (owner, number, limit)), BatchRecord)

    def unfinished(self) -> Sequence[BatchRecord]:
        """Returns all unfinished batches, the oldest first."""
        query = "SELECT record FROM batches WHERE ended_s IS NULL ORDER BY number"
        return _all(self._database.execute(query), BatchRecord)

    def is_read(self, file_id: str) -> bool:
        """Returns True if an unfinished batch reads the file."""
        query = "SELECT 1 FROM batches WHERE input_id = ? AND ended_s IS NULL"
        return self._database.execute(query, (file_id,)).fetchone() is not None

    def remove_ended(self, before_s: float) -> None:
        self._database.execute("DELETE FROM batches WHERE ended_s <= ?", (int(before_s),))


def _first(rows: sqlite3.Cursor, kind: type[Record]) -> Record | None:
    row = rows.fetchone()
    return None if row is None else msgspec.json.decode(row[0], type=kind)


def _all(rows: sqlite3.Cursor, kind: type[Record]) -> list[Record]:
    return [msgspec.json.decode(row[0], type=kind) for row in rows]
