"""Whether any worker could begin a group at once. Pure: over the books of what the workers were given."""

from collections.abc import Callable, Iterable

from motet.routing.fleet import Member


def has_room(
    members: Iterable[Member], *, choices: int, largest_part: int, prompt_tokens: int, on_the_way: int
) -> bool:
    """`members`: those that may get it. `largest_part`: of the choices, those that one worker has to take.
    `on_the_way`: choices that were let through and stand in no books yet.

    A worker has room if it holds nothing, whatever the size of the group, or places for the choices and blocks for its
    trunk and a tail block each. A group in parts needs places for all of them beside that. A worker that refused a
    group a moment ago has none. Looks no further than needed."""
    fits, busy, free_choices = False, on_the_way > 0, -on_the_way
    whole = largest_part >= choices
    for member in members:
        if member.worker is None or member.refused:
            continue
        info, books = member.worker.engine.info, member.books
        free = info.max_num_seqs - member.open_choices
        blocks = books.trunk_blocks + books.tail_blocks + -(-prompt_tokens // info.block_size) + largest_part
        fits = fits or member.open_choices == 0 or (free >= largest_part and blocks <= info.num_blocks)
        busy = busy or member.open_choices > 0
        free_choices += max(0, free)
        if fits and (free_choices >= choices or (whole and not on_the_way)):
            return True
    return fits and not busy


class Look:
    """One look for many groups, while room only becomes less: whatever is at least as large, in choices and in prompt,
    as a group that had no room has none either. So a long queue costs little more than its kinds of groups."""

    def __init__(self, has_room: Callable[[int, int], bool]) -> None:
        """`has_room`: of so many choices and prompt tokens."""
        self._has_room = has_room
        self._too_large: list[tuple[int, int]] = []
        """None of them as large as another."""

    def fits(self, choices: int, prompt_tokens: int) -> bool:
        if any(choices >= other and prompt_tokens >= tokens for other, tokens in self._too_large):
            return False
        if self._has_room(choices, prompt_tokens):
            return True
        larger = [one for one in self._too_large if one[0] >= choices and one[1] >= prompt_tokens]
        self._too_large = [*(one for one in self._too_large if one not in larger), (choices, prompt_tokens)]
        return False
