"""The progress of a batch as text."""

import pytest

from motet.batch.run import BatchProgress
from motet.cli.batch.batch_display import RATE_WINDOW_S, RateMeter, duration
from tests.clock import Clock


def test_rates_are_measured_over_the_last_minute() -> None:
    progress, clock = BatchProgress(1_000_000, num_before=1000), Clock()
    meter = RateMeter(progress, clock=clock)
    assert meter.measure().text(progress) == "1,000 of 1,000,000: 0.0/s, 0 tokens/s"
    for _ in range(200):
        clock.now_s += 1
        progress.num_completed += 50
        progress.num_tokens += 4000
        rates = meter.measure()
    assert rates.text(progress) == "11,000 of 1,000,000: 50.0/s, 4,000 tokens/s, 5:29:40 left"
    clock.now_s += 2 * RATE_WINDOW_S
    progress.num_failed = 7
    meter.measure()
    clock.now_s += 1
    assert meter.measure().text(progress) == "11,007 of 1,000,000: 0.0/s, 0 tokens/s, 7 failed"


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0 s"), (59.4, "59 s"), (61, "1:01"), (3661, "1:01:01")])
def test_a_duration_is_short(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
