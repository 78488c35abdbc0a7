"""The limit of requests in progress, on a simulated server."""

import heapq

import pytest

from motet.batch.concurrency import FIRST_LIMIT, ConcurrencyLimit
from tests.clock import Clock


class SimulatedServer:
    """Runs up to `capacity` requests at the same time, each in one second; a step with more takes longer. Above
    `max_requests` it refuses."""

    def __init__(self, capacity: int, *, max_requests: int = 10**6) -> None:
        self._capacity = capacity
        self._max_requests = max_requests
        self._clock = Clock(1.0)
        self._ends: list[float] = []

    def run(self, limit: ConcurrencyLimit, *, num_requests: int) -> list[int]:
        """Returns the limit after each request."""
        limits: list[int] = []
        while len(limits) < num_requests:
            while len(self._ends) < limit.limit:
                if len(self._ends) >= self._max_requests:
                    limit.refused(now_s=self._clock.now_s)
                    break
                slowness = max(1.0, (len(self._ends) + 1) / self._capacity)
                heapq.heappush(self._ends, self._clock.now_s + slowness)
                limit.sent(len(self._ends), now_s=self._clock.now_s)
            self._clock.now_s = max(heapq.heappop(self._ends), self._clock.now_s)
            limit.finished(1, now_s=self._clock.now_s)
            limits.append(limit.limit)
        return limits


@pytest.mark.parametrize("capacity", [4, 32, 200])
def test_the_limit_finds_the_capacity_of_a_server(capacity: int) -> None:
    limits = SimulatedServer(capacity).run(ConcurrencyLimit(), num_requests=100 * capacity)
    late = limits[len(limits) // 2 :]
    assert 0.5 * capacity <= min(late)
    assert max(late) <= max(4 * capacity, 2 * FIRST_LIMIT)


def test_the_limit_stays_below_a_number_that_the_server_refuses() -> None:
    limits = SimulatedServer(10**6, max_requests=50).run(ConcurrencyLimit(), num_requests=4000)
    assert max(limits) <= 128
    assert sum(limits[2000:]) / 2000 > 15


def test_a_fixed_limit_stays() -> None:
    assert set(SimulatedServer(4, max_requests=6).run(ConcurrencyLimit(fixed=9), num_requests=100)) == {9}


def test_refusals_of_one_moment_count_once_and_those_of_an_outage_too() -> None:
    limit = ConcurrencyLimit(limit=64)
    for now_s in (10.0, 10.1, 20.0, 50.0):
        limit.refused(now_s=now_s)
        assert limit.limit == 32
    limit.finished(1, now_s=60.0)
    limit.refused(now_s=61.0)
    assert limit.limit == 16


def test_the_limit_grows_again_after_a_cut() -> None:
    server, limit = SimulatedServer(200), ConcurrencyLimit(limit=2)
    limit.refused(now_s=0.0)
    assert server.run(limit, num_requests=4000)[-1] >= 100
