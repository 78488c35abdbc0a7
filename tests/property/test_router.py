"""However workers die, leave and return, each reader gets the first tokens of an uninterrupted group."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.routing_play import Act, Play, acts
from tests.property_settings import examples
from tests.routing.scene import Scene

pytestmark = pytest.mark.slow


@examples(60)
@given(
    acts=st.lists(acts, min_size=10, max_size=60),
    apart=st.booleans(),
    workers=st.integers(1, 4),
    spread_choices=st.sampled_from([0, 2, 2, 4]),
    limit=st.sampled_from([0, 3, 1000]),
)
def test_each_reader_gets_the_first_tokens_of_an_undisturbed_group(
    acts: list[Act], apart: bool, workers: int, spread_choices: int, limit: int
) -> None:
    async def play() -> None:
        decoding = [f"{'decode' if apart else 'both'}-{number}" for number in range(workers)]
        names = (["prefill-0"] if apart else []) + decoding
        server = Scene(*names, spread_choices=spread_choices, limit=limit)
        await Play(names, server).act(acts)

    asyncio.run(play())
