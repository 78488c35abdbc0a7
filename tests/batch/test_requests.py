"""Which lines are sent in which order, and how much of an input is in memory."""

from collections.abc import Iterator
from contextlib import closing
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.batch.id_table import IdMark, IdTable
from motet.batch.line_reader import read_lines
from motet.batch.lines import BATCH_URLS, BatchLine
from motet.batch.requests import NumberedLine, beginning, windows
from tests.property_settings import examples

LINE, OTHER = BatchLine("7", BATCH_URLS[0], b"{}"), BatchLine("7", BATCH_URLS[0], b"{ }")


class CountedInput:
    """Requests with ids of their numbers, made when they are read."""

    def __init__(self, bodies: Iterator[bytes]) -> None:
        self.num_read = 0
        self._bodies = bodies

    def read(self) -> Iterator[NumberedLine]:
        for number, body in enumerate(self._bodies, start=1):
            self.num_read += 1
            yield NumberedLine(number, BatchLine(f"{number}", BATCH_URLS[0], body))


@pytest.fixture
def ids() -> Iterator[IdTable]:
    with closing(IdTable()) as table:
        yield table


def test_a_window_is_bounded_by_lines(ids: IdTable) -> None:
    lines = CountedInput(b"{}" for _ in range(100))
    sent = 0
    for window in windows(lines, ids, max_lines=7):
        sent += len(window)
        assert len(window) <= 7
        assert lines.num_read == sent
    assert sent == 100


def test_a_window_is_bounded_by_bytes(ids: IdTable) -> None:
    large = CountedInput(b'{"x": "%s"}' % (b"x" * 1000) for _ in range(10))
    assert [len(window) for window in windows(large, ids, max_bytes=3000)] == [3, 3, 3, 1]


def test_requests_with_equal_beginnings_are_sent_one_after_the_other(ids: IdTable) -> None:
    beginnings = ("b", "a", "c", "a", "b", "a", "c")
    bodies = (b'{"seed": 1, "messages": [{"role": "system", "content": "%s"}]}' % one.encode() for one in beginnings)
    (window,) = windows(CountedInput(bodies), ids)
    assert [numbered.number for numbered in window] == [2, 4, 6, 1, 5, 3, 7]


def test_a_beginning_is_what_the_prompt_starts_with() -> None:
    url, other = BATCH_URLS[:2]
    same = [b'{"prompt": "x", "seed": 1}', b'{"seed": 2, "prompt": "x"}']
    assert len({beginning(BatchLine("a", url, body)) for body in same}) == 1
    different = [
        b'{"prompt": "x", "model": "m"}',
        b'{"input": "x"}',
        b'{"prompt": "x", "tools": []}',
        b'{"prompt": [1]}',
    ]
    assert len({beginning(BatchLine("a", url, body)) for body in [*same, *different]}) == 5
    assert beginning(BatchLine("a", other, same[0])) != beginning(BatchLine("a", url, same[0]))


@examples(30)
@given(texts=st.lists(st.text(max_size=3), max_size=40), marks=st.lists(st.sampled_from([1, 2, 4]), min_size=40))
def test_a_table_of_ids_is_a_dictionary(texts: list[str], marks: list[int]) -> None:
    model = dict[str, int]()
    with closing(IdTable()) as table:
        for one, mark in zip(texts, marks, strict=False):
            assert table.add(one, IdMark(mark)) == model.get(one, 0)
            model[one] = model.get(one, 0) | mark
        assert len(table) == len(model)


@pytest.mark.parametrize(
    ("stored", "matches"),
    [(LINE.id, True), (OTHER.id, False), (None, True), ("batch_req_123", True), (f"batch_req_{'x' * 32}", True)],
    ids=["same", "other", "none", "short", "no digest"],
)
def test_a_result_is_of_a_request_unless_its_id_is_of_another(ids: IdTable, stored: str | None, matches: bool) -> None:
    ids.add("7", IdMark.FINISHED, line_id=stored)
    ids.add("7", IdMark.LISTED)
    assert ids.is_of("7", LINE.id) is matches


@examples(100)
@given(
    pieces=st.lists(st.binary(max_size=12).map(lambda piece: piece.replace(b"\n", b"")), max_size=10),
    ends=st.booleans(),
    max_bytes=st.integers(1, 12),
)
def test_lines_are_read_with_their_ends(pieces: list[bytes], ends: bool, max_bytes: int) -> None:
    content = b"\n".join(pieces) + (b"\n" if ends else b"")
    lines = list(read_lines(BytesIO(content), max_bytes=max_bytes))
    expected = BytesIO(content).readlines()
    assert [line.start for line in lines] == [len(b"".join(expected[:number])) for number in range(len(expected))]
    for line, text in zip(lines, expected, strict=True):
        assert line.text == (text if len(text.rstrip(b"\n")) <= max_bytes else None)
