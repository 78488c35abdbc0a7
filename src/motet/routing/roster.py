"""Workers that may get the same work, kept so that a decision about one group need not go through thousands of them.

Made when who may get it is asked for first after a member changed (`Catalog`); a decision then looks at a few by id.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from motet.routing.member import Member


@dataclass(frozen=True, eq=False)
class Roster:
    """Made by `roster`."""

    members: tuple[Member, ...]
    ids: tuple[str, ...]
    """Of the members, in their order."""
    by_id: dict[str, Member]
    block_sizes: frozenset[int]
    """Of those that have been met."""

    def without(self, ids: Collection[str]) -> "Roster":
        """The same without these, which may be unknown; itself if there is nobody to leave out."""
        if not any(id in self.by_id for id in ids):
            return self
        return roster(member for member in self.members if member.id not in ids)


def roster(members: Iterable[Member]) -> Roster:
    by_id = {member.id: member for member in members}
    return Roster(
        members=tuple(by_id.values()),
        ids=tuple(by_id),
        by_id=by_id,
        block_sizes=frozenset(member.block_size for member in by_id.values() if member.block_size),
    )
