"""W3C Trace Context: what is read from the two headers, and written into them."""

import pytest

from motet.tracing.context import TraceContext, context_in, headers_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("sent", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-03", 3),
        (f"cc-{TRACE}-{SPAN}-01-what-a-later-version-adds", 1),
        (f" 00-{TRACE}-{SPAN}-01 ", 1),
    ],
)
def test_a_valid_header_is_read(sent: str, flags: int) -> None:
    assert context_in(sent, "vendor=1") == TraceContext(TRACE, SPAN, flags, "vendor=1")


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\nx: y",
    ],
)
def test_any_other_header_counts_as_none(sent: str) -> None:
    assert context_in(sent) is None


@pytest.mark.parametrize("state", ["x" * 513, "a=1\r\nx: y", "a=\u00e9"], ids=["long", "line break", "not ASCII"])
def test_a_state_that_cannot_be_passed_on_is_left_out(state: str) -> None:
    assert context_in(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, 1, "")


def test_what_was_read_is_written_again() -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1,b=2"}
    assert headers_of(context_in(headers["traceparent"], headers["tracestate"])) == headers
    assert headers_of(None) == {}
