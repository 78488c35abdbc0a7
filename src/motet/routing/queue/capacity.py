"""Decides if workers have the capacity for a group: for its choices, its trunk, and one tail block of each choice."""

from collections.abc import Callable, Iterable

from motet.routing.choosing.cost import can_start
from motet.routing.workers.member import Member


def have_capacity(
    members: Iterable[Member], *, choices: int, largest_part: int, prompt_tokens: int, choices_prefilling: int
) -> bool:
    """Returns True if the workers could start the group at once. Pure: reads only the workers' loads.

    `members`: the workers that may get it. `largest_part`: maximum number of choices that one worker must take.
    `choices_prefilling`: number of admitted choices that are not in the load of any worker yet.

    A worker that has just refused a group has no capacity. An idle worker takes a group of any size. For any other
    worker `can_start` decides. A group in parts also needs capacity for all its choices together. Stops at the first
    members that suffice."""
    fits, busy, free_choices = False, choices_prefilling > 0, -choices_prefilling
    one_part = largest_part >= choices
    for member in members:
        if member.worker is None or member.faults.refused:
            continue
        info, load = member.worker.engine.info, member.load
        open_choices = load.open_choices
        fits = (
            fits
            or not open_choices
            or can_start(
                open_choices=open_choices,
                max_choices=info.max_num_seqs,
                held_blocks=load.trunk_blocks + load.tail_blocks,
                num_blocks=info.num_blocks,
                choices=largest_part,
                prompt_blocks=-(-prompt_tokens // info.block_size),
            )
        )
        busy = busy or open_choices > 0
        free_choices += max(0, info.max_num_seqs - open_choices)
        if fits and (free_choices >= choices or (one_part and not choices_prefilling)):
            return True
    return fits and not busy


class CapacityCache:
    """Checks the capacity for many groups in one turn of the event loop, in which capacity only decreases. If a group
    did not fit, a group with at least as many choices and prompt tokens does not fit either. So the time for a long
    queue grows with the number of different group sizes in it."""

    def __init__(self, has_capacity: Callable[[int, int], bool]) -> None:
        """`has_capacity`: takes a number of choices and a number of prompt tokens."""
        self._has_capacity = has_capacity
        self._too_large: list[tuple[int, int]] = []
        """The smallest sizes that did not fit. None of them is at least as large as another in both numbers."""

    def fits(self, choices: int, prompt_tokens: int) -> bool:
        if any(choices >= size[0] and prompt_tokens >= size[1] for size in self._too_large):
            return False
        if self._has_capacity(choices, prompt_tokens):
            return True
        larger = [size for size in self._too_large if size[0] >= choices and size[1] >= prompt_tokens]
        self._too_large = [*(size for size in self._too_large if size not in larger), (choices, prompt_tokens)]
        return False
