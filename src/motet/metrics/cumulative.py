"""A histogram that somebody else counted, as Prometheus has it."""

from collections.abc import Sequence
from itertools import accumulate

INFINITY = "+Inf"


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Each bound, and how many values are not above it. `counts`: of values above the bound before, and of the rest;
    empty where nothing has been counted."""
    counts = counts or [0] * (len(bounds) + 1)
    return list(zip([*map(str, bounds), INFINITY], accumulate(counts), strict=True))
