"""The figures of pulls: the histogram of the metrics and the line of the log."""

import pytest

from motet.transfer.figures import BUCKET_BOUNDS_S, LOG_EVERY_S, TransferFigures, log_line
from motet.transfer.orders import PullLanded
from tests.clock import Clock


def landed(seconds: float, *, post_seconds: float = 0.001, megabytes: int = 1, descriptors: int = 1) -> PullLanded:
    return PullLanded(0, megabytes * 2**20, descriptors, seconds, post_seconds)


def test_a_pull_is_counted_under_the_smallest_bound_that_it_does_not_exceed() -> None:
    figures = TransferFigures()
    for seconds in (0.0, BUCKET_BOUNDS_S[0], 0.0011, BUCKET_BOUNDS_S[-1], BUCKET_BOUNDS_S[-1] + 0.1):
        figures.add(landed(seconds))
    counts = figures.counts
    assert len(counts) == len(BUCKET_BOUNDS_S) + 1
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 1, 1, 1)
    assert sum(counts) == 5
    assert figures.seconds_sum == pytest.approx(20.1021)


def test_the_bounds_ascend_from_a_millisecond_to_the_default_time_out() -> None:
    assert list(BUCKET_BOUNDS_S) == sorted(set(BUCKET_BOUNDS_S))
    assert (BUCKET_BOUNDS_S[0], BUCKET_BOUNDS_S[-1]) == (0.001, 10.0)


def test_the_line_gives_averages_p90_and_bandwidth() -> None:
    quick = landed(0.010, post_seconds=0.001, megabytes=2, descriptors=4)
    slow = landed(0.030, post_seconds=0.002, megabytes=4, descriptors=8)
    # 8 x 2 + 2 x 4 = 24 MB in 0.14 s; the ninth of ten values is a slow one
    assert log_line([quick] * 8 + [slow] * 2) == (
        "KV transfers: number=10 transfer_ms_avg=14.0 transfer_ms_p90=30.0 post_ms_avg=1.2 post_ms_p90=2.0"
        " mb_avg=2.4 mb_per_s=171.4 descriptors_avg=4.8"
    )


def test_p90_of_one_pull_is_that_pull() -> None:
    assert "transfer_ms_p90=7.0" in log_line([landed(0.007)])


def test_a_line_comes_ten_seconds_after_the_first_pull_and_counts_each_pull_once() -> None:
    clock = Clock()
    figures = TransferFigures(clock)
    figures.add(landed(0.01))
    clock.now_s += LOG_EVERY_S / 2
    figures.add(landed(0.01))
    assert figures.log_due_s == 100.0 + LOG_EVERY_S
    assert figures.take_log_line() is None

    clock.now_s = 100.0 + LOG_EVERY_S
    assert "number=2 " in (figures.take_log_line() or "")

    figures.add(landed(0.01))
    clock.now_s += LOG_EVERY_S
    assert "number=1 " in (figures.take_log_line() or "")


def test_without_pulls_there_is_no_line() -> None:
    clock = Clock()
    figures = TransferFigures(clock)
    figures.add(landed(0.01))
    clock.now_s += LOG_EVERY_S
    figures.take_log_line()
    clock.now_s += 1000
    assert figures.log_due_s is None
    assert figures.take_log_line() is None
