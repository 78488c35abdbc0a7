"""JSON in pieces of bounded size. One call that encodes or copies megabytes holds the GIL, and delays every stream.

JsonArray     an array that grows, as bytes: objects would take seven times as much memory
JsonPieces    a value inside of an object that is encoded: its JSON, in pieces
json_pieces   encodes an object that has such values
in_pieces     encodes an answer with an array of objects; `around_choices` makes what is around its choices
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

Buffer = bytes | bytearray

PIECE_BYTES = 1 << 18
"""Approximate size of the pieces in which an answer is sent."""
CHUNK_BYTES = 1 << 16
"""Approximate size of the chunks in which an array is kept."""
ENTRIES = 32
"""Number of entries of complete arrays that are made and encoded at a time."""
MARK = b"\0"
"""Stands for a `JsonPieces` while the object around it is encoded. Otherwise JSON has no such byte, only its escape."""


class JsonPieces:
    """The JSON of a value, in pieces."""

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self.pieces = pieces


class JsonArray:
    """A JSON array that grows at its end."""

    def __init__(self) -> None:
        self.chunks: list[bytearray] = []
        """The entries, joined by commas."""

    def add(self, entries: Sequence[object]) -> int:
        """Adds entries. Returns the number of bytes that they take."""
        if not entries:
            return 0
        encoded, chunks = msgspec.json.encode(entries), self.chunks
        if not chunks:
            chunks.append(bytearray())
        else:
            chunks[-1] += b","
            if len(chunks[-1]) >= CHUNK_BYTES:
                chunks.append(bytearray())
        chunks[-1] += memoryview(encoded)[1:-1]
        return len(encoded)

    def json(self, *, before: "JsonArray | None" = None) -> JsonPieces:
        """Returns the JSON of the array so far. It must be encoded before the array grows again. `before`: an array
        whose entries come first."""
        first = before.chunks if before is not None else []
        between = [b","] if first and self.chunks else []
        return JsonPieces([b"[", *first, *between, *self.chunks, b"]"])


def json_arrays(length: int, entries: Callable[[slice], Mapping[str, Sequence[object]]]) -> dict[str, JsonArray]:
    """Returns arrays of `length` entries by their names. `entries`: returns the entries of a part of the arrays."""
    arrays = dict[str, JsonArray]()
    for start in range(0, length, ENTRIES):
        for name, added in entries(slice(start, start + ENTRIES)).items():
            arrays.setdefault(name, JsonArray()).add(added)
    return arrays


def json_pieces(value: object) -> Iterator[Buffer]:
    """Yields the JSON of an object. Values inside it can be `JsonPieces`."""
    inside: list[JsonPieces] = []

    def mark(value: object) -> msgspec.Raw:
        if not isinstance(value, JsonPieces):
            raise NotImplementedError(f"{type(value)} has no JSON")
        inside.append(value)
        return msgspec.Raw(MARK)

    encoded = msgspec.json.encode(value, enc_hook=mark)
    if not inside:
        yield encoded
        return
    first, *others = encoded.split(MARK)
    yield first
    for found, rest in zip(inside, others, strict=True):
        yield from found.pieces
        yield rest


def gathered(parts: Iterable[Buffer]) -> Iterator[bytes]:
    """Yields the parts, joined to pieces of about `PIECE_BYTES`."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def in_pieces(opening: bytes, items: Iterable[object], *, closing: Iterable[Buffer]) -> Sequence[bytes]:
    """Returns the JSON of an answer with an array of `items` between `opening` and `closing`. Each item is encoded
    separately."""

    def parts() -> Iterator[Buffer]:
        yield opening
        for number, item in enumerate(items):
            if number:
                yield b","
            yield from json_pieces(item)
        yield from closing

    return [*gathered(parts())]


def around_choices(head: bytes, rest: Mapping[str, object]) -> tuple[bytes, Iterator[Buffer]]:
    """Returns the JSON before and after the choices of an answer. `head`: its first fields, without the brace."""

    def closing() -> Iterator[Buffer]:
        first, *others = json_pieces(rest)
        yield b"]," + first[1:]
        yield from others

    return head + b',"choices":[', closing()
