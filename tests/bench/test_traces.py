"""`bench.traces` compares neighbours in time, and asks for traces as a client does."""

import os

from bench.frontend_client import request_bytes
from bench.traces import cpu_us, ratio, with_trace


def test_the_ratio_is_that_of_neighbours() -> None:
    assert ratio([2.0, 30.0, 8.0], [1.0, 10.0, 4.0]) == 2.0


def test_a_request_with_a_trace_has_one_header_more() -> None:
    request = request_bytes("/v1/completions", {"prompt": "x"})
    first, header, rest = with_trace(request, sampled=True).split(b"\r\n", 2)
    assert first + b"\r\n" + rest == request
    assert header.startswith(b"traceparent: 00-") and header.endswith(b"-01")
    assert with_trace(request, sampled=False).split(b"\r\n")[1].endswith(b"-00")


def test_the_time_of_a_process_grows_with_its_work() -> None:
    began = cpu_us(os.getpid())
    while cpu_us(os.getpid()) == began:
        sum(range(10_000))
    assert cpu_us(os.getpid()) > began
