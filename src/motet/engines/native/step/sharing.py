"""Groups that use what other groups compute: the same prompt, or the same beginning of one.

    a group whose prompt another one has computed, and still holds    joins its trunk: all blocks, the last one too
    a group that lacks blocks which another one is computing          follows it: it waits until they are there

A trunk is never written again once it is computed, since tails begin in blocks of their own. So the group that joins
takes all its blocks, and runs the last token of its prompt only for the logits from which its first tokens are drawn.
Attention reads one trunk once a step for all groups that have it.

Followers are no leader's business: if it leaves, fails or is preempted, they wait as if it had never been, and the
first that is admitted computes for the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from motet.block_names import BlockName
from motet.engines.native.step.sequence import Group, TrunkKey

WHOLE = 2**62
"""More blocks than a trunk has: who needs so many waits until all of it is computed."""


@dataclass(eq=False)
class SharedTrunk:
    """A trunk of groups that run, with equal prompts, or one that is kept for more of them (`keeping`): ready then."""

    key: TrunkKey
    first: Group
    """The group that computes it, or has."""
    groups: set[Group] = field(default_factory=set)
    ready: bool = False
    """True once all of it is computed."""
    blocks: list[int] = field(default_factory=list)
    """Its blocks, once it is ready."""
    kept: bool = False
    """True while it is there without groups too."""


class Sharing:
    """Knows what running groups compute, and who waits for it. Work is constant for each block of a group's prompt."""

    def __init__(self) -> None:
        self._trunks: dict[TrunkKey, SharedTrunk] = {}
        self._computing: dict[BlockName, Group] = {}
        """The group that will publish a block of this name."""
        self._followers: dict[Group, list[tuple[int, int, Group]]] = {}
        """For each leader a heap of: number of its blocks that are needed | number of the follower | follower. One that
        has left stays in it, without a leader, until its turn comes."""
        self._order = count()

    @property
    def followers(self) -> Iterator[Group]:
        for leader, heap in self._followers.items():
            yield from (group for _, _, group in heap if group.leader is leader)

    def trunk(self, group: Group) -> SharedTrunk | None:
        """Returns the trunk of running groups with the same prompt, or a kept one, if there is one."""
        return self._trunks.get(group.trunk_key) if group.trunk_key is not None else None

    def leader(self, group: Group, num_hits: int, *, usable: int) -> Group | None:
        """Returns the group that computes the first block which this one lacks. `num_hits`: number of blocks that it
        has found; `usable`: the most that it could use."""
        return self._computing.get(group.names[num_hits]) if num_hits < min(usable, len(group.names)) else None

    def follow(self, group: Group, leader: Group, *, whole: bool) -> None:
        """Lets a group wait for the blocks that both have in common, or for the `whole` trunk."""
        needed = WHOLE if whole else _num_common(group.names, leader.names)
        heappush(self._followers.setdefault(leader, []), (needed, next(self._order), group))
        group.leader = leader

    def entered(self, group: Group, *, block_size: int) -> None:
        """Notes a group that runs now. It has joined the trunk that is there, or is the first to have it."""
        if group.trunk_key is not None:
            trunk = self._trunks.setdefault(group.trunk_key, SharedTrunk(group.trunk_key, group))
            if group.joined or trunk.first is group:
                trunk.groups.add(group)
        for name in group.names[group.published : group.trunk_tokens // block_size]:
            self._computing.setdefault(name, group)

    def advanced(self, group: Group, published: int) -> list[Group]:
        """Notes that the blocks of a group from number `published` on may have become findable. Returns the followers
        that have what they waited for."""
        for name in group.names[published : group.published]:
            self._forget_name(name, group)
        whole = group.computed == group.trunk_tokens
        if whole and (trunk := self.trunk(group)) is not None and trunk.first is group:
            trunk.ready, trunk.blocks = True, group.blocks
        heap = self._followers.get(group, [])
        there = WHOLE if whole else group.published
        woken = []
        while heap and heap[0][0] <= there:
            follower = heappop(heap)[2]
            if follower.leader is group:
                woken.append(_freed(follower))
        if not heap:
            self._followers.pop(group, None)
        return woken

    def left(self, group: Group) -> list[Group]:
        """Notes that a group does not run any more. Returns its followers."""
        for name in group.names[group.published :]:
            self._forget_name(name, group)
        if group.trunk_key is not None and (trunk := self.trunk(group)) is not None and group in trunk.groups:
            trunk.groups.remove(group)
            if not trunk.ready:
                del self._trunks[group.trunk_key]
            self._forget_empty(trunk)
        heap = self._followers.pop(group, [])
        return [_freed(follower) for _, _, follower in heap if follower.leader is group]

    def forsake(self, trunk: SharedTrunk) -> None:
        """Notes that a trunk is kept no more."""
        trunk.kept = False
        self._forget_empty(trunk)

    def remove(self, group: Group) -> None:
        """Takes out a follower that waits for nothing any more."""
        _freed(group)

    def forget(self) -> list[Group]:
        """Lets nobody find anything of those that run now. Returns all followers."""
        woken = [_freed(group) for group in list(self.followers)]
        self._trunks.clear()
        self._computing.clear()
        self._followers.clear()
        return woken

    def check(self, running: set[Group]) -> None:
        """Raises AssertionError unless it knows running groups only, and each follower its leader."""
        known = {*self._followers, *self._computing.values(), *(g for t in self._trunks.values() for g in t.groups)}
        if not known <= running:
            raise AssertionError("a group is followed that does not run")
        for leader, heap in self._followers.items():
            if not heap or any(group.leader not in (leader, None) for _, _, group in heap):
                raise AssertionError("a follower does not know its leader")
        for trunk in self._trunks.values():
            if len(trunk.groups) > 1 and len({tuple(group.blocks) for group in trunk.groups}) > 1:
                raise AssertionError("groups that share a trunk have different blocks")

    def _forget_empty(self, trunk: SharedTrunk) -> None:
        if not (trunk.groups or trunk.kept) and self._trunks.get(trunk.key) is trunk:
            del self._trunks[trunk.key]

    def _forget_name(self, name: BlockName, group: Group) -> None:
        if self._computing.get(name) is group:
            del self._computing[name]


def _freed(group: Group) -> Group:
    group.leader = None
    return group


def _num_common(names: list[BlockName], others: list[BlockName]) -> int:
    """Returns the number of blocks at the beginning that have the same names. A name stands for all blocks before."""
    low, high = 0, min(len(names), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if names[middle - 1] == others[middle - 1] else (low, middle - 1)
    return low
