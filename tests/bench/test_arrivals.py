"""Requests that arrive at random: their schedule and figures, and the same requests for both servers."""

import itertools
import json
from collections import Counter

import pytest

from bench.compare.__main__ import main
from bench.compare.arrivals import RequestMix, RequestTimes, ScheduleRun, figures_of, percentile, schedule

MIX = RequestMix({1: 6.0, 8: 3.0, 32: 1.0}, (140, 1340), (64, 256))


def test_a_seed_determines_the_schedule() -> None:
    assert schedule(2.0, 60.0, MIX, seed=1) == schedule(2.0, 60.0, MIX, seed=1)
    assert schedule(2.0, 60.0, MIX, seed=1) != schedule(2.0, 60.0, MIX, seed=2)


def test_requests_arrive_at_the_given_rate_and_in_the_given_mix() -> None:
    arrivals = schedule(100.0, 100.0, MIX, seed=0)
    due = [arrival.due_s for arrival in arrivals]
    assert due == sorted(due) and due[0] > 0 and due[-1] < 100.0
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert sum(gap < 0.01 for gap in gaps) / len(gaps) == pytest.approx(0.632, rel=0.05)  # 1 - 1/e: exponential
    ns = Counter(arrival.n for arrival in arrivals)
    assert [ns[n] / len(arrivals) for n in (1, 8, 32)] == pytest.approx([0.6, 0.3, 0.1], rel=0.1)
    lengths = Counter((arrival.prompt_tokens, arrival.max_tokens) for arrival in arrivals)
    assert len(lengths) == 4 and min(lengths.values()) > 2000


def test_a_percentile_is_the_nearest_rank() -> None:
    assert percentile([], 99) is None
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(i) for i in range(1, 101)], 99) == 99.0
    assert percentile([float(i) for i in range(1, 51)], 99) == 50.0


def test_failed_requests_are_counted_and_add_no_tokens() -> None:
    runs = [
        ScheduleRun([RequestTimes(1.0, 2.0, 3.0, 100), None], span_s=5.0, peak_mib=10.0),
        ScheduleRun([RequestTimes(2.0, 3.0, 4.0, 200), None], span_s=5.0, peak_mib=30.0),
    ]
    figures = figures_of(runs)
    assert (figures["tokens_per_s"], figures["requests"], figures["failed"], figures["peak_mib"]) == (30.0, 4, 2, 30.0)
    assert (figures["first_p50_s"], figures["last_first_p99_s"], figures["total_p99_s"]) == (1.0, 3.0, 4.0)


@pytest.mark.slow
def test_both_servers_get_the_same_requests_and_json_comes_out(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--rate", "40", "--duration", "0.5", "--prompt-tokens", "20,40", "--max-tokens", "4", "--ns", "3"]
    more = ["--mix", "1:1,3:1", "--repeats", "1", "--seed", "3", "--settle", "0", "--idle", "0.02"]
    assert main(["--ours", url, "--peer", url, *load, *more]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["arrivals"] > 5
    for server in ("ours", "peer"):
        figures = report[server]
        assert (figures["requests"], figures["failed"]) == (report["arrivals"], 0)
        assert 0 < figures["first_p50_s"] <= figures["total_p50_s"] <= figures["total_p99_s"]
        assert figures["tokens_per_s"] > 0
    assert report["ratios"]["requests"] == 1.0
