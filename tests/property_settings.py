"""Number of examples that a property test generates.

make check        `--hypothesis-profile=quick`: a quarter of what the test gives to `examples`, or of the usual 100;
                  tests that go through `some` cases get every fourth
make test         that number
make test-long    `--hypothesis-profile=long`: ten times that number
"""

from collections.abc import Sequence
from typing import TypeVar
from zlib import crc32

from hypothesis import settings

T = TypeVar("T")

TIMES = {"quick": 1 / 4, "all": 1, "long": 10}
"""The factor of each profile."""


def register_profiles() -> None:
    """Registers the profiles. There is no `deadline`, since an example can wait for a core longer than it runs."""
    for name, times in TIMES.items():
        settings.register_profile(name, deadline=None, max_examples=round(100 * times))
    settings.load_profile("all")


def examples(count: int, *, steps: int | None = None) -> settings:
    """Returns the settings of one test. `steps` limits the steps of an example of a state machine."""
    drawn = settings(max_examples=round(count * TIMES[settings.get_current_profile_name()]))
    return drawn if steps is None else settings(drawn, stateful_step_count=steps)


def some(cases: Sequence[T], name: str) -> Sequence[T]:
    """Returns all cases, or with `quick` every fourth. The first one depends on `name`, so tests with different
    names get different cases."""
    step = round(1 / min(1, TIMES[settings.get_current_profile_name()]))
    return cases[crc32(name.encode()) % step :: step]
