"""Which workers of a large fleet are looked at for one group, so that a decision costs the same with 100 and 1000.

All of them up to `EVERYBODY`. Beyond that: those that are special for this group (its session, the longest cached
prefixes) and a window of the others, another one each turn. The least loaded of 64 is nearly as good as that of all
(Mitzenmacher, "The power of two choices in randomized load balancing", 2001; docs/log.md for figures).
"""

from collections.abc import Container, Sequence
from itertools import islice

EVERYBODY = 128
"""Fleets up to this size are looked at whole."""
WINDOW = 64
LONGEST = 16
"""Workers with the longest cached prefixes that are looked at beside the window."""
GOLDEN = 0.618033988749895
"""Windows that begin at multiples of it, modulo 1, lie evenly at any moment, and never in the same places again."""


def shortlist(
    ids: Sequence[str], overlap: dict[str, int], session: str | None, *, able: Container[str], turn: int
) -> Sequence[str]:
    """Of the workers `ids`, those to choose from. `overlap`: cached blocks of the prompt by worker, rising; `session`:
    where the session was last. Both may name workers that are not among `ids`; `able` tells quickly who is."""
    if len(ids) <= EVERYBODY:
        return ids
    first = int(turn * GOLDEN % 1.0 * len(ids))
    window = [ids[(first + step) % len(ids)] for step in range(WINDOW)]
    special = list(islice((id for id in reversed(overlap) if id in able), LONGEST))
    if session is not None and session in able:
        special.append(session)
    return list(dict.fromkeys([*special, *window]))
