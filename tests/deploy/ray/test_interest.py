"""A replica notices that Serve is ending it, and takes nothing else for that."""

import asyncio

import pytest

from motet.deploy.ray.interest import LEAST_S, OVERDUE_S, Interest

pytestmark = pytest.mark.anyio


class Serve:
    """Ends somebody, or not; `waits` counts the seconds that the replica has looked."""

    def __init__(self) -> None:
        self.ends_one = True
        self.times_asked = 0
        self.waits = 0
        self.until: dict[int, str] = {}
        self.interest = Interest(self._answers, wait=self._wait)

    async def _answers(self) -> bool:
        self.times_asked += 1
        return self.ends_one

    async def _wait(self, seconds: float) -> None:
        assert seconds == 1.0
        self.waits += 1
        match self.until.get(self.waits):
            case "asks":
                self.interest.asked()
            case "ends nobody":
                self.ends_one = False
            case "ends one":
                self.ends_one = True
        if self.waits > 1000:
            await asyncio.Event().wait()


async def test_one_that_is_not_asked_any_more_is_being_ended() -> None:
    serve = Serve()
    serve.interest.asked()
    await serve.interest.lost(30.0)
    assert serve.waits == 30


async def test_whoever_is_asked_stays() -> None:
    serve = Serve()
    serve.interest.asked()
    serve.until = {20: "asks", 45: "asks"}
    await serve.interest.lost(30.0)
    assert serve.waits == 74  # counted from the last question on, which came within the 45th second


async def test_a_controller_is_asked_only_by_whom_it_passes_over() -> None:
    """Its answer tells of all replicas: all of them together would keep it busy."""
    serve = Serve()
    serve.interest.asked()
    serve.until = dict.fromkeys(range(3, 60, 3), "asks")
    await serve.interest.lost(10.0)
    assert serve.waits == 57 + 9
    assert serve.times_asked == 10 - OVERDUE_S


async def test_a_controller_that_is_away_ends_nobody() -> None:
    serve = Serve()
    serve.interest.asked()
    serve.until = {10: "ends nobody", 500: "ends one"}
    await serve.interest.lost(30.0)
    assert serve.waits == 9 + 490 + 21


async def test_one_that_was_never_asked_is_still_starting() -> None:
    serve = Serve()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(serve.interest.lost(30.0), timeout=0.2)
    assert serve.waits > 1000


async def test_the_shortest_time_leaves_room_for_a_controller_that_is_busy() -> None:
    serve = Serve()
    serve.interest.asked()
    await serve.interest.lost(0.0)
    assert serve.waits == LEAST_S
