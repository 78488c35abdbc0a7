"""JSON in pieces: the same bytes as JSON that is encoded at once, and no piece that takes long to copy."""

import msgspec
import pytest

from motet.api.generation.json_pieces import (
    CHUNK_BYTES,
    PIECE_BYTES,
    EncodedJson,
    JsonArray,
    around_choices,
    encode_answer,
    encode_arrays,
    encode_json,
)

NUMBERS = [*range(100_000)]


def array_of(entries: list[object], *, each: int) -> JsonArray:
    array = JsonArray()
    for start in range(0, len(entries), each):
        array.add(entries[start : start + each])
    return array


@pytest.mark.parametrize("each", [1, 7, 100_000])
def test_an_array_has_the_json_of_its_entries(each: int) -> None:
    array = array_of(NUMBERS, each=each)
    assert b"".join(array.json().pieces) == msgspec.json.encode(NUMBERS)
    assert sum(map(len, array.json().pieces)) <= array.add(NUMBERS)


def test_an_array_that_grows_is_kept_in_chunks() -> None:
    array = array_of(NUMBERS, each=10)
    assert len(array.chunks) > 5
    assert max(map(len, array.chunks)) < CHUNK_BYTES + 100


def test_entries_can_come_before_those_of_an_array() -> None:
    first, array, empty = array_of([1, 2], each=1), array_of([3], each=1), JsonArray()
    for before, own, expected in ((first, array, [1, 2, 3]), (first, empty, [1, 2]), (empty, array, [3])):
        assert msgspec.json.decode(b"".join(own.json(before=before).pieces)) == expected


def test_values_in_pieces_are_inside_of_an_object() -> None:
    array = array_of([{"a": "\0", "b": "é"}], each=1)
    value = {
        "text": "\0 \\u0000",
        "first": array.json(),
        "inner": [{"second": array.json()}, None],
        "raw": msgspec.Raw(b"7"),
    }
    joined = b"".join(encode_json(value))
    entries = [{"a": "\0", "b": "é"}]
    expected = {"text": "\0 \\u0000", "first": entries, "inner": [{"second": entries}, None], "raw": 7}
    assert msgspec.json.decode(joined) == expected
    assert joined == msgspec.json.encode(expected)


def test_an_object_without_json_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        list(encode_json({"a": object()}))


def test_complete_arrays_are_made_part_by_part() -> None:
    parts = []

    def entries(part: slice) -> dict[str, list[int]]:
        parts.append(len(NUMBERS[part]))
        return {"a": NUMBERS[part], "b": [-number for number in NUMBERS[part]]}

    arrays = encode_arrays(1000, entries)
    assert max(parts) <= 32
    assert msgspec.json.decode(b"".join(arrays["a"].json().pieces)) == NUMBERS[:1024]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_answer_is_sent_in_pieces_of_bounded_size(count: int) -> None:
    array = array_of(NUMBERS, each=10)
    opening, closing = around_choices(b'{"id":"x"', {"usage": None, "scores": array.json()})
    items = [{"index": index, "ids": array.json()} for index in range(count)]
    pieces = encode_answer(opening, items, closing=closing)
    whole = {"id": "x", "choices": [{"index": index, "ids": NUMBERS} for index in range(count)]}
    assert b"".join(pieces) == msgspec.json.encode(whole | {"usage": None, "scores": NUMBERS})
    assert max(map(len, pieces)) <= PIECE_BYTES + CHUNK_BYTES + 100
    assert all(isinstance(piece, bytes) for piece in pieces)


def test_pieces_can_be_bytes_of_any_json() -> None:
    assert b"".join(encode_json(EncodedJson([b"[", b"]"]))) == b"[]"
