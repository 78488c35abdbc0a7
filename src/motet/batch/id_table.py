"""The ids of a batch with their marks, in 24 to 48 bytes for each, for files with millions of lines.

Layout of a slot, empty if its marks are 0:

    [ 0..10]   digest of the custom_id
    [11..14]   start of the digest of the request, from the id of its result; zeros if it is not known
    [15]       marks

Collisions are resolved by linear probing. The table doubles when two thirds of its slots are used, so that a million
ids take 32 MiB, and 48 MiB while it doubles. A dictionary of texts would take 150 MB."""

from enum import IntFlag
from hashlib import blake2b

from motet.batch.lines import ID_PREFIX

SLOT_BYTES = 16
KEY_BYTES = 11
REQUEST_BYTES = 4
FIRST_SLOTS = 1024
UNKNOWN = bytes(REQUEST_BYTES)


class IdMark(IntFlag):
    NONE = 0
    FINISHED = 1
    """The output file has the result of the request."""
    LISTED = 2
    """The first pass over the input file has read a line with this id."""
    SENT = 4
    """The second pass has read a line with this id, and sent it unless it was finished."""


class IdTable:
    """A hash table from ids to marks. An id cannot be removed."""

    def __init__(self) -> None:
        self._slots = bytearray(FIRST_SLOTS * SLOT_BYTES)
        self._num_used = 0

    def __len__(self) -> int:
        return self._num_used

    def add(self, custom_id: str, mark: IdMark, *, line_id: str | None = None) -> IdMark:
        """Adds a mark, and returns the marks that the id had before. `line_id`: id of the result, to be stored."""
        key = _key(custom_id)
        start = self._slot(key)
        last = start + SLOT_BYTES - 1
        before = self._slots[last]
        if not before:
            self._num_used += 1
            self._slots[start : start + KEY_BYTES] = key
        if line_id is not None:
            self._slots[start + KEY_BYTES : last] = _request_part(line_id)
        self._slots[last] = before | mark
        if not before and self._num_used * 3 > len(self._slots) // SLOT_BYTES * 2:
            self._double()
        return IdMark(before)

    def is_of(self, custom_id: str, line_id: str) -> bool:
        """Returns False if the stored result is the result of another request than `line_id`; True if its request is
        not known."""
        start = self._slot(_key(custom_id)) + KEY_BYTES
        stored = self._slots[start : start + REQUEST_BYTES]
        return stored == UNKNOWN or stored == _request_part(line_id)

    def _slot(self, key: bytes) -> int:
        """Returns the start of the slot of a key, or of the empty slot for it."""
        slots = self._slots
        num_slots = len(slots) // SLOT_BYTES
        start = (int.from_bytes(key[:8]) & (num_slots - 1)) * SLOT_BYTES
        while slots[start + SLOT_BYTES - 1] and slots[start : start + KEY_BYTES] != key:
            start = (start + SLOT_BYTES) % len(slots)
        return start

    def _double(self) -> None:
        former = self._slots
        self._slots = bytearray(2 * len(former))
        for start in range(0, len(former), SLOT_BYTES):
            if former[start + SLOT_BYTES - 1]:
                new = self._slot(bytes(former[start : start + KEY_BYTES]))
                self._slots[new : new + SLOT_BYTES] = former[start : start + SLOT_BYTES]


def _key(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


def _request_part(line_id: str) -> bytes:
    """Returns the start of the digest in an id of a result; zeros for an id that Motet did not make."""
    digits = line_id.removeprefix(ID_PREFIX)
    try:
        digest = bytes.fromhex(digits) if line_id.startswith(ID_PREFIX) and len(digits) == 32 else UNKNOWN
    except ValueError:
        return UNKNOWN
    return digest[:REQUEST_BYTES]
