"""The ids of a batch with their marks, in a temporary database of SQLite: the memory does not depend on the number of
lines, and a file can have millions."""

import re
import sqlite3
from enum import IntFlag

from motet.batch.lines import ID_PREFIX
from motet.errors import BatchStoppedError

SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -32768; -- in KiB. Larger tables are in a file without a name, which ends with the process
CREATE TABLE ids (custom_id TEXT PRIMARY KEY, marks INTEGER NOT NULL, line_id TEXT) WITHOUT ROWID;
BEGIN;
"""
DIGEST_ID = re.compile(rf"{ID_PREFIX}[0-9a-f]{{32}}")
"""Form of `BatchLine.id`. Results of other programs have other ids."""


class IdMark(IntFlag):
    NONE = 0
    FINISHED = 1
    """The output file has the result of the request."""
    LISTED = 2
    """The first pass over the input file has read a line with this id."""
    SENT = 4
    """The second pass has read a line with this id, and sent it unless it was finished."""


class IdTable:
    """A table from ids to marks. An id cannot be removed. Threads can use it one after the other."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.executescript(SCHEMA)
        self._num_ids = 0

    def __len__(self) -> int:
        return self._num_ids

    def add(self, custom_id: str, mark: IdMark, *, line_id: str | None = None) -> IdMark:
        """Adds a mark, and returns the marks that the id had before. `line_id`: id of the result, to be stored. Raises
        BatchStoppedError if the disk is full."""
        known = line_id if line_id is not None and DIGEST_ID.fullmatch(line_id) else None
        try:
            row = self._database.execute("SELECT marks FROM ids WHERE custom_id = ?", (custom_id,)).fetchone()
            if row is None:
                self._database.execute("INSERT INTO ids VALUES (?, ?, ?)", (custom_id, int(mark), known))
                self._num_ids += 1
                return IdMark.NONE
            query = "UPDATE ids SET marks = ?, line_id = coalesce(?, line_id) WHERE custom_id = ?"
            self._database.execute(query, (row[0] | mark, known, custom_id))
        except sqlite3.Error as error:
            raise BatchStoppedError(f"the ids of the lines cannot be stored in a temporary file: {error}") from error
        return IdMark(row[0])

    def is_of(self, custom_id: str, line_id: str) -> bool:
        """Returns False if the stored result is the result of another request than `line_id`; True if its request is
        not known."""
        query = "SELECT line_id FROM ids WHERE custom_id = ?"
        (stored,) = self._database.execute(query, (custom_id,)).fetchone() or (None,)
        return stored is None or stored == line_id

    def close(self) -> None:
        self._database.close()
