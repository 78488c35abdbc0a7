"""The figures of several workers as one."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from motet.types import EngineStats

SUMMED = tuple(field.name for field in msgspec.structs.fields(EngineStats) if field.type is int or field.type is float)
"""All but those below, which are no plain numbers."""


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Sums; of ages the greatest."""
    failures: Counter[str] = Counter()
    for one in stats:
        failures.update(one.transfer_failures)
    return EngineStats(
        **{name: sum(getattr(one, name) for one in stats) for name in SUMMED},
        oldest_lease_s=max((s.oldest_lease_s for s in stats if s.oldest_lease_s is not None), default=None),
        transfer_seconds=tuple(map(sum, zip_longest(*(s.transfer_seconds for s in stats), fillvalue=0))),
        transfer_failures=dict(failures),
    )
