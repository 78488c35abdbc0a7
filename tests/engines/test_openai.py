"""Streams of events are read the same wherever their bytes are cut, and however their lines end."""

import pytest

from motet.engines.openai import MAX_EVENT_BYTES, EventSplitter
from motet.errors import EngineError

STREAMS = {
    "LF": (b'data: {"a": 1}\n\ndata: b\n\n', [b'{"a": 1}', b"b"]),
    "CRLF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "CR": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "mixed": (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
    "comments, names and ids": (b": hello\n\nevent: x\nid: 7\ndata: a\n: more\n\n\n\ndata: b\n\n", [b"a", b"b"]),
    "without a space": (b"data:a\n\n", [b"a"]),
    "several lines": (b"data: {\ndata: }\n\n", [b"{\n}"]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "cut off": (b"data: a\n\ndata: b\n", [b"a"]),
}


@pytest.mark.parametrize("name", list(STREAMS))
def test_a_stream_reads_the_same_wherever_it_is_cut(name: str) -> None:
    data, events = STREAMS[name]
    for cut in range(len(data) + 1):
        reader = EventSplitter()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == events
    reader = EventSplitter()
    assert [event for byte in data for event in reader.feed(bytes([byte]))] == events


@pytest.mark.parametrize("line", [b"data: %b\n", b"%b"], ids=["lines", "one line"])
def test_an_event_that_never_ends_is_refused(line: bytes) -> None:
    reader = EventSplitter()
    with pytest.raises(EngineError, match=f"more than {MAX_EVENT_BYTES} bytes"):
        for _ in range(3):
            reader.feed(line % (b"x" * (MAX_EVENT_BYTES // 2)))
