"""What is told about pulls: the histogram of the metrics and the line of log."""

import subprocess
import sys

from motet.transfer.figures import LINE_EVERY_S, SECONDS, PullFigures, SecondsHistogram, TransferLine, line_of


def test_a_pull_is_counted_under_the_least_bound_it_does_not_exceed() -> None:
    histogram = SecondsHistogram()
    for seconds in (0.0, SECONDS[0], 0.0011, SECONDS[-1], SECONDS[-1] + 0.1):
        histogram.add(seconds)
    counts = histogram.counts
    assert len(counts) == len(SECONDS) + 1
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 1, 1, 1)
    assert sum(counts) == 5
    assert histogram.sum_s == 0.0 + SECONDS[0] + 0.0011 + SECONDS[-1] + SECONDS[-1] + 0.1


def test_the_bounds_rise_from_a_millisecond_to_the_default_time_out() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 10.0)


def test_the_line_gives_averages_p90_and_bandwidth() -> None:
    pulls = [PullFigures(0.010, 0.001, 2 * 2**20, 4)] * 8 + [PullFigures(0.030, 0.002, 4 * 2**20, 8)] * 2
    # 8 x 2 + 2 x 4 = 24 MB in 0.14 s; the ninth of ten values is one of the slow ones
    assert line_of(pulls) == (
        "KV transfers: number=10 transfer_ms_avg=14.0 transfer_ms_p90=30.0 post_ms_avg=1.2 post_ms_p90=2.0"
        " mb_avg=2.4 mb_per_s=171.4 descriptors_avg=4.8"
    )


def test_p90_of_one_pull_is_that_pull() -> None:
    assert "transfer_ms_p90=7.0" in line_of([PullFigures(0.007, 0.0, 1, 1)])


def test_a_line_comes_ten_seconds_after_the_first_pull_and_none_while_there_are_no_pulls() -> None:
    line = TransferLine()
    assert line.due_s is None
    assert line.take(1000.0) is None

    line.add(PullFigures(0.01, 0.001, 2**20, 1), now_s=5.0)
    line.add(PullFigures(0.01, 0.001, 2**20, 1), now_s=9.0)
    assert line.due_s == 5.0 + LINE_EVERY_S
    assert line.take(5.0 + LINE_EVERY_S - 0.1) is None
    assert "number=2 " in (line.take(5.0 + LINE_EVERY_S) or "")

    assert line.due_s is None
    assert line.take(1000.0) is None
    line.add(PullFigures(0.01, 0.001, 2**20, 1), now_s=30.0)
    assert "number=1 " in (line.take(30.0 + LINE_EVERY_S) or "")


def test_the_metrics_may_import_the_bounds_without_loading_torch_or_zmq() -> None:
    code = "import sys, motet.transfer.figures; print([n for n in ('torch', 'zmq', 'nixl') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
