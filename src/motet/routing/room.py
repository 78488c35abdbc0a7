"""Whether any worker could begin a group at once. Pure: over the books of what the workers were given."""

from collections.abc import Iterable

from motet.routing.fleet import Member


def has_room(members: Iterable[Member], *, choices: int, prompt_tokens: int, on_the_way: int) -> bool:
    """`members`: those that may get it. `on_the_way`: choices that were let through and stand in no books yet.

    A worker has room if it holds nothing, whatever the size of the group, or places for the choices and blocks for its
    trunk and a tail block each. One that refused a group a moment ago has none. Looks no further than needed."""
    fits, free_choices = False, -on_the_way
    for member in members:
        if member.worker is None or member.refused:
            continue
        info, books = member.worker.engine.info, member.books
        free = info.max_num_seqs - member.open_choices
        blocks = books.trunk_blocks + books.tail_blocks + -(-prompt_tokens // info.block_size) + choices
        fits = fits or member.open_choices == 0 or (free >= choices and blocks <= info.num_blocks)
        free_choices += max(0, free)
        if fits and (free_choices >= choices or not on_the_way):
            return True
    return False
