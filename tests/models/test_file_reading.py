"""A read that hangs is given up, and a slow read is not."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from motet.errors import ModelLoadError
from motet.models import file_reading
from motet.models.file_reading import CHECKS, STALL_S, FileReading
from tests.patience import PATIENCE_S

FILE = Path("/mnt/a.safetensors")
SHORT_S = 0.02
HANGS = r"/mnt/a.safetensors cannot be read: nothing has arrived for 0.02 s"


def test_a_read_that_hangs_is_given_up_and_its_thread_ends_at_the_next_piece() -> None:
    """The bug: an update whose file was on a network mount that hung waited for ever."""
    answers, ended = threading.Event(), threading.Event()
    reading = FileReading(stall_s=SHORT_S)

    def items() -> Iterator[int]:
        try:
            reading.note(FILE)
            yield 1
            reading.note(FILE)
            answers.wait(PATIENCE_S)
            reading.note(FILE)
            yield 2
        finally:
            ended.set()

    ahead = reading.ahead(items())
    assert next(ahead) == 1
    with pytest.raises(ModelLoadError, match=HANGS):
        next(ahead)
    assert not ended.is_set()
    answers.set()
    assert ended.wait(PATIENCE_S)


def test_one_result_that_hangs_is_given_up() -> None:
    answers = threading.Event()
    reading = FileReading(stall_s=SHORT_S)
    reading.note(FILE)
    with pytest.raises(ModelLoadError, match=HANGS):
        reading.run(lambda: answers.wait(PATIENCE_S))
    answers.set()


def test_a_slow_read_takes_as_long_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece arrives in half of the time after which a read counts as hanging, 100 times."""
    reading = FileReading()
    looks = 0

    def look(futures: list[Future[str]], timeout_s: float) -> object:
        nonlocal looks
        looks += 1
        if looks > 100 * CHECKS // 2:
            return wait(futures)
        if looks % (CHECKS // 2) == 0:
            reading.note(FILE)
        assert timeout_s == STALL_S / CHECKS
        return SimpleNamespace(done=set())

    monkeypatch.setattr(file_reading, "wait", look)
    assert reading.run(lambda: "all") == "all"


def test_errors_and_the_end_reach_the_thread_that_waits() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyError("x")

    ahead = FileReading().ahead(items())
    assert [next(ahead) for _ in range(5)] == [*range(5)]
    with pytest.raises(KeyError):
        next(ahead)
    reading = FileReading()
    assert [*reading.ahead(iter(range(9)))] == [*range(9)]
    reading.note(FILE)  # other threads can read on


def test_a_reader_whose_items_are_not_needed_ends() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.set()

    for _ in FileReading().ahead(items()):
        break
    assert ended.wait(PATIENCE_S)


def test_a_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reading, "PIECE_BYTES", 4)
    file = tmp_path / "x"
    file.write_bytes(b"0123456789abcdef")
    reading = FileReading()
    assert [bytes(piece) for piece in reading.pieces(file, begin=1, end=11)] == [b"1234", b"5678", b"9a"]
    assert [*reading.pieces(file, begin=3, end=3)] == []
    memory = bytearray(9)
    reading.read_into(memoryview(memory), file, begin=2)
    assert memory == b"23456789a"
    for read in (
        lambda: reading.read_into(memoryview(memory), file, begin=9),
        lambda: [*reading.pieces(file, begin=9, end=18)],
    ):
        with pytest.raises(ModelLoadError, match="x has become shorter while it was read"):
            read()
