"""How many examples a property test draws: all in `make test`, fewer in `make check`, which is to take a minute.

make test     the number that the test gives to `examples`, or hypothesis's own 100
make check    `--hypothesis-profile=quick`: a quarter of either
"""

from hypothesis import settings

QUICK = "quick"
SHARE = 4


def register_profiles() -> None:
    """`deadline`: an example may wait for a core longer than it runs."""
    settings.register_profile("all", deadline=None)
    settings.register_profile(QUICK, settings.get_profile("all"), max_examples=100 // SHARE)
    settings.load_profile("all")


def examples(count: int, *, steps: int | None = None) -> settings:
    """Of one test; `steps`: at most so many in an example, where it is a history of them."""
    drawn = settings(max_examples=count // SHARE if settings.get_current_profile_name() == QUICK else count)
    return drawn if steps is None else settings(drawn, stateful_step_count=steps)
