"""Over how many decode workers a large group is split, and how many choices each gets. Pure.

    time(k) = fetch(k) + steps x time a step takes for each choice on the fullest of the k workers

Splitting shortens the steps, for each worker writes fewer choices, and costs a fetch of the prompt for each part: a
pull if there is a ticket, else the prompt computed again. The k least loaded workers are filled up to one level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.routing.cost import CHOICE_MS, PROMPT_TOKEN_MS, PULL_TOKEN_MS

PART_MS = 2.0
"""What a part costs beside its fetch: a submission and a stream more."""
STEPS = 256
"""Of an answer whose length nobody knows; a shorter limit on it counts."""


@dataclass(frozen=True)
class Group:
    """What is to be split."""

    choices: int
    prompt_tokens: int
    max_tokens: int
    ticket: bool
    """Whether its prompt is fetched; else every part computes it."""


def plan_parts(group: Group, open_choices: Sequence[int], *, spread_choices: int) -> list[int]:
    """Choices of each part, none empty; one part: not to be split. `open_choices`: of each worker there is.

    A group of up to `spread_choices` is not split, and no part is made smaller than half of it."""
    if not spread_choices or group.choices <= spread_choices:
        return [group.choices]
    least = max(1, spread_choices // 2)
    most_parts = min(len(open_choices), group.choices // least)
    levels = sorted(open_choices)
    plans = [filled(group.choices, levels[:parts]) for parts in range(1, most_parts + 1)]
    plans = [plan for plan in plans if min(plan) >= least]
    return min(plans, key=lambda plan: (time_ms(group, plan, levels), len(plan)), default=[group.choices])


def time_ms(group: Group, plan: Sequence[int], levels: Sequence[int]) -> float:
    """Until the last choice has ended, less what no split changes. `levels`: open choices of the workers, in order."""
    fetch_ms = group.prompt_tokens * (PULL_TOKEN_MS if group.ticket else PROMPT_TOKEN_MS)
    fullest = max(level + choices for level, choices in zip(levels, plan, strict=False))
    return len(plan) * (fetch_ms + PART_MS) + min(group.max_tokens, STEPS) * fullest * CHOICE_MS


def filled(choices: int, levels: Sequence[int]) -> list[int]:
    """So many choices poured over workers with `levels` (in order, the lowest first) until all stand level."""
    plan = [0] * len(levels)
    left = choices
    for width in range(1, len(levels) + 1):
        step = (levels[width] - levels[width - 1]) * width if width < len(levels) else left
        poured = min(left, step)
        for place in range(width):
            plan[place] += poured // width + (place < poured % width)
        left -= poured
    return plan
