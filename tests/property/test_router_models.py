"""Several models and kinds in one fleet: no group is on a worker without its model, no ticket goes to a worker that
cannot read it, each ticket is released once, and each reader gets the first tokens of an uninterrupted group."""

import asyncio

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.property.routing_play import ADAPTER_ACTS, OFTEN, Act, GroupReader, Play
from tests.property_settings import examples
from tests.routing.kinds import ADAPTER, FRENCH, A, B, KindsScene

MODELS = (A, A, B, FRENCH)
NAMES = (
    "prefill-a-vllm-0",
    "decode-a-vllm-0",
    "prefill-a-motet-0",
    "decode-a-motet-0",
    "decode-a-motet-1",
    "both-b-vllm-0",
    "prefill-b-motet-0",
    "decode-b-motet-0",
)


class MixedPlay(Play):
    """A play in which some workers of `A` have the adapter, and can lose it."""

    server: KindsScene

    def submit(self, number: int) -> None:
        model = MODELS[number % len(MODELS)]
        self.readers.append(GroupReader(self.server, f"g{len(self.readers)}", number // 2, model=model))

    def offer(self, name: str, *, adapter: bool) -> None:
        if name in self.server.engines and name.split("-")[1] == A:
            self.server.offer(name, *([ADAPTER] if adapter else []))

    async def finish(self) -> None:
        for name in self.names:
            self.offer(name, adapter=True)
        await super().finish()
        if self.server.unreleased.groups:
            event("a ticket was left to its lease")
        if any(ticket.foreign for engine in self.server.all for ticket in engine.released):
            event("a foreign ticket was released")


MIXED = [*OFTEN, *ADAPTER_ACTS * 2]
acts = st.builds(Act, st.sampled_from(MIXED), st.integers(0, 31), st.integers(0, 6))


@pytest.mark.slow
@examples(80)
@given(
    acts=st.lists(acts, min_size=10, max_size=60),
    names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=len(NAMES), unique=True),
    adapted=st.lists(st.booleans(), min_size=len(NAMES), max_size=len(NAMES)),
    spread_choices=st.sampled_from([0, 2, 2, 4]),
    limit=st.sampled_from([0, 3, 1000]),
)
def test_groups_and_tickets_are_only_sent_where_they_can_be_used(
    acts: list[Act], names: list[str], adapted: list[bool], spread_choices: int, limit: int
) -> None:
    async def play() -> None:
        server = KindsScene(*names, spread_choices=spread_choices, limit=limit)
        scene = MixedPlay(names, server)
        for name, adapter in zip(names, adapted, strict=False):
            scene.offer(name, adapter=adapter)
        await scene.act(acts)

    asyncio.run(play())
