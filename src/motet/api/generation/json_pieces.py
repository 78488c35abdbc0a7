"""JSON in pieces of bounded size. One call that encodes or copies megabytes holds the GIL, and delays every stream.

JsonArray        an array that grows, as JSON: Python objects would take seven times as much memory
encode_arrays    encodes complete arrays as `JsonArray`s, a few entries at a time
EncodedJson      a part of an object that is already JSON, in pieces
encode_json      encodes an object that can have such parts
encode_answer    encodes an answer with an array of objects, one object at a time
around_choices   encodes the fields of an answer before and after the array of its choices
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
"""Stands for an `EncodedJson` while the object around it is encoded. JSON never contains this byte, only its escape."""


class EncodedJson:
    """The JSON of a value in pieces, which is a part of an object."""

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

    def json(self, *, before: "JsonArray | None" = None) -> EncodedJson:
        """Returns the JSON of the array so far. It must be used before the array grows again. `before`: an array whose
        entries come first."""
        first = before.chunks if before is not None else []
        between = [b","] if first and self.chunks else []
        return EncodedJson([b"[", *first, *between, *self.chunks, b"]"])


def encode_arrays(length: int, entries: Callable[[slice], Mapping[str, Sequence[object]]]) -> dict[str, JsonArray]:
    """Returns arrays of `length` entries by their names. `entries`: returns the entries of a slice of each array."""
    arrays = dict[str, JsonArray]()
    for start in range(0, length, ENTRIES):
        for name, added in entries(slice(start, start + ENTRIES)).items():
            arrays.setdefault(name, JsonArray()).add(added)
    return arrays


def encode_json(value: object) -> Iterator[Buffer]:
    """Yields the JSON of an object in pieces. Its parts can be `EncodedJson`."""
    inside: list[EncodedJson] = []

    def mark(value: object) -> msgspec.Raw:
        if not isinstance(value, EncodedJson):
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


def joined_pieces(parts: Iterable[Buffer]) -> Iterator[bytes]:
    """Yields pieces of about `PIECE_BYTES`, which are joined from smaller ones."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def encode_answer(opening: bytes, items: Iterable[object], *, closing: Iterable[Buffer]) -> Sequence[bytes]:
    """Returns the JSON of an answer in pieces: `opening`, the items of an array, and `closing`. Each item is encoded
    separately."""

    def parts() -> Iterator[Buffer]:
        yield opening
        for number, item in enumerate(items):
            if number:
                yield b","
            yield from encode_json(item)
        yield from closing

    return [*joined_pieces(parts())]


def around_choices(head: bytes, rest: Mapping[str, object]) -> tuple[bytes, Iterator[Buffer]]:
    """Returns the JSON before and after the choices of an answer. `head`: its first fields, without the closing
    brace."""

    def closing() -> Iterator[Buffer]:
        first, *others = encode_json(rest)
        yield b"]," + first[1:]
        yield from others

    return head + b',"choices":[', closing()
