"""`bench.traces` compares consecutive answers, and sends trace headers as a client does."""

import os

from bench.frontend.raw_client import request_bytes
from bench.traces import RatioInterval, SpentCpu, cpu_us, row_of, with_trace


def test_ratios_compare_consecutive_answers() -> None:
    assert RatioInterval.of([2.0, 30.0, 8.0], [1.0, 10.0, 4.0]) == RatioInterval(2.0, 2.0, 3.0)
    assert RatioInterval.of([*map(float, range(1, 101))], [100.0] * 100) == RatioInterval(0.41, 0.505, 0.6)


def test_the_cost_after_an_answer_is_added_to_its_cost() -> None:
    spent = {
        "off": [SpentCpu(90.0, 0.0, 0.0)],
        "unsampled": [SpentCpu(100.0, 900.0, 0.0)],
        "on": [SpentCpu(101.0, 900.0, 5.0)],
    }
    row = row_of(spent, hand_over_us=2.0, sender_us=7.0)
    assert (row.api_us, row.engine_us) == (100.0, 900.0)
    assert round(row.recorded.median, 6) == 1.03
    assert round(row.recorded_all.median, 6) == 1.01


def test_a_request_with_a_trace_has_one_more_header() -> None:
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
