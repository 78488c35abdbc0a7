"""Groups of any size that arrive, are read, stopped and left in any order, on workers with little capacity."""

import asyncio

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motet.errors import OverloadedError
from tests.property.routing_play import LARGEST, Act, GroupReader, Play
from tests.property_settings import examples
from tests.routing.scene import Received, Scene

pytestmark = pytest.mark.slow

MAX_CHOICES = 4


class CrowdedPlay(Play):
    """A play without deaths: a group runs to its end, or is refused for lack of capacity before its first token."""

    def submit(self, number: int) -> None:
        priority = number // LARGEST % 3 - 1
        self.readers.append(GroupReader(self.server, f"g{len(self.readers)}", number, priority=priority))

    def check_capacity(self) -> None:
        """Checks that each group of a worker started while the worker could hold another choice."""
        for engine in self.server.all:
            *others, _ = [len(group.unfinished) for group in engine.open.values()] or [0]
            assert sum(others) < MAX_CHOICES

    async def finish(self) -> None:
        await super().finish()
        for reader in self.readers:
            if reader.error is not None:
                assert isinstance(reader.error, OverloadedError)
                assert reader.received == Received()
                event("a group was refused")
        admitted = sum(len(engine.requests) for engine in self.server.all)
        assert sum(self.server.router.counts.queue_seconds) == admitted


KINDS = ["a group comes"] * 6 + ["read"] * 13 + ["stop a choice", "close a group", "time passes"]
acts = st.builds(Act, st.sampled_from(KINDS), st.integers(0, 23), st.integers(0, 5))


@examples(60)
@given(acts=st.lists(acts, min_size=10, max_size=80), workers=st.integers(1, 3))
def test_every_group_ends_once_and_no_worker_gets_more_than_it_can_hold(acts: list[Act], workers: int) -> None:
    async def play() -> None:
        names = [f"both-{number}" for number in range(workers)]
        await CrowdedPlay(names, Scene(*names, max_choices=MAX_CHOICES, queue_timeout_s=30.0)).act(acts)

    asyncio.run(play())
