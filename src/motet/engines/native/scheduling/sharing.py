"""Groups that use KV which other groups compute: the trunk of an equal prompt, or leading blocks of their prompt.

    an equal prompt has been computed               the group joins: it holds all blocks of that trunk, also the last
    another group computes leading blocks of it     the group follows: it waits for these blocks

A computed trunk is never written again, because tails start in blocks of their own. A group that joins a trunk computes
only the last prompt token, for the logits from which its first tokens are sampled. Attention reads a trunk once per
step for all groups that hold it.

A group does not depend on its followers. If it leaves, fails or is preempted, its followers return to the queue, and
the first of them that is admitted computes the blocks for the others.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from motet.block_names import BlockName
from motet.engines.native.step.sequence import Group, TrunkKey

ALL_BLOCKS = 2**62
"""Larger than any number of blocks: a follower that needs this number waits for the complete trunk."""


@dataclass(eq=False)
class SharedTrunk:
    """The trunk of running groups with equal prompts, or a kept trunk (`keeping`), which is always complete."""

    key: TrunkKey
    first: Group
    """The group that computes the trunk, or has computed it."""
    groups: set[Group] = field(default_factory=set)
    """The running groups that hold the trunk."""
    complete: bool = False
    """True once all prompt tokens are computed."""
    blocks: list[int] = field(default_factory=list)
    """The blocks of the trunk, once it is complete. Groups and `KeptTrunks` hold them, this object does not."""
    kept: bool = False
    """True while the trunk is kept even if no group uses it."""


class Sharing:
    """The trunks and blocks that running groups compute, and their followers. All operations take constant time per
    block."""

    def __init__(self) -> None:
        self._trunks: dict[TrunkKey, SharedTrunk] = {}
        self._computing: dict[BlockName, Group] = {}
        """The group that will publish the block of this name."""
        self._followers: dict[Group, list[tuple[int, int, Group]]] = {}
        """For each followed group, a heap of (number of its leading blocks that are needed, serial number, follower). A
        follower that was removed stays in the heap, with `followed` unset, until it is popped."""
        self._numbers = count()

    @property
    def followers(self) -> Iterator[Group]:
        for followed, heap in self._followers.items():
            yield from (group for _, _, group in heap if group.followed is followed)

    def trunk_of(self, group: Group) -> SharedTrunk | None:
        """Returns the trunk of running groups with the same prompt, or the kept trunk of this prompt, if any."""
        return self._trunks.get(group.trunk.key) if group.trunk.key is not None else None

    def complete_trunk_of(self, group: Group) -> SharedTrunk | None:
        """Returns the trunk that a running group shares or can share, if it is complete. A scored group does not join a
        trunk. Other groups can join its trunk unless there is another one for this prompt."""
        trunk, shared = group.trunk, self.trunk_of(group)
        if trunk.key is not None and shared is None and trunk.complete and group.admitted:
            shared = self._trunks[trunk.key] = SharedTrunk(
                trunk.key, group, {group}, complete=True, blocks=trunk.blocks
            )
        return shared if shared is not None and shared.complete else None

    def group_computing(self, group: Group, num_hits: int, *, max_hits: int) -> Group | None:
        """Returns the running group that computes the first block which `group` lacks, if any. `num_hits`: number of
        the group's blocks in the prefix cache; `max_hits`: maximum number of cached blocks that the group can use."""
        names = group.trunk.names
        return self._computing.get(names[num_hits]) if num_hits < min(max_hits, len(names)) else None

    def follow(self, group: Group, followed: Group, *, complete: bool) -> None:
        """Makes `group` wait for the leading blocks that both groups have in common, or for the `complete` trunk."""
        needed = ALL_BLOCKS if complete else num_common(group.trunk.names, followed.trunk.names)
        heappush(self._followers.setdefault(followed, []), (needed, next(self._numbers), group))
        group.followed = followed

    def entered(self, group: Group, *, block_size: int) -> None:
        """Called when a group starts to run. It has joined a trunk, or is the first group with its prompt."""
        trunk = group.trunk
        if trunk.key is not None:
            shared = self._trunks.setdefault(trunk.key, SharedTrunk(trunk.key, group))
            if trunk.joined or shared.first is group:
                shared.groups.add(group)
        for name in trunk.names[trunk.num_published : trunk.num_tokens // block_size]:
            self._computing.setdefault(name, group)

    def advanced(self, group: Group, num_published: int) -> list[Group]:
        """Called when tokens of a group's trunk were computed. `num_published`: number of its blocks that were in the
        prefix cache before. Returns the followers whose blocks are available now."""
        trunk = group.trunk
        for name in trunk.names[num_published : trunk.num_published]:
            self._forget_name(name, group)
        if trunk.complete and (shared := self.trunk_of(group)) is not None and shared.first is group:
            shared.complete, shared.blocks = True, trunk.blocks
        heap = self._followers.get(group, [])
        available = ALL_BLOCKS if trunk.complete else trunk.num_published
        woken = []
        while heap and heap[0][0] <= available:
            follower = heappop(heap)[2]
            if follower.followed is group:
                follower.followed = None
                woken.append(follower)
        if not heap:
            self._followers.pop(group, None)
        return woken

    def left(self, group: Group) -> list[Group]:
        """Called when a group stops running. Returns its followers."""
        trunk = group.trunk
        for name in trunk.names[trunk.num_published :]:
            self._forget_name(name, group)
        if trunk.key is not None and (shared := self.trunk_of(group)) is not None and group in shared.groups:
            shared.groups.remove(group)
            if not shared.complete:
                del self._trunks[trunk.key]
            self._forget_unused(shared)
        heap = self._followers.pop(group, [])
        followers = [follower for _, _, follower in heap if follower.followed is group]
        for follower in followers:
            follower.followed = None
        return followers

    def unkeep(self, shared: SharedTrunk) -> None:
        """Called when a trunk is not kept any more."""
        shared.kept = False
        self._forget_unused(shared)

    def clear(self) -> list[Group]:
        """Removes all trunks and followers, so that no later group shares KV with a group that runs now. Returns the
        followers."""
        followers = list(self.followers)
        for group in followers:
            group.followed = None
        self._trunks.clear()
        self._computing.clear()
        self._followers.clear()
        return followers

    def check(self, running: set[Group]) -> None:
        """Raises AssertionError unless all known groups run, and each follower knows the group that it follows."""
        holders = (group for shared in self._trunks.values() for group in shared.groups)
        if not {*self._followers, *self._computing.values(), *holders} <= running:
            raise AssertionError("a followed group does not run")
        for followed, heap in self._followers.items():
            if not heap or any(group.followed not in (followed, None) for _, _, group in heap):
                raise AssertionError("a follower follows another group than its heap says")
        for shared in self._trunks.values():
            if len(shared.groups) > 1 and len({tuple(group.trunk.blocks) for group in shared.groups}) > 1:
                raise AssertionError("groups that share a trunk have different blocks")

    def _forget_unused(self, shared: SharedTrunk) -> None:
        if not (shared.groups or shared.kept) and self._trunks.get(shared.key) is shared:
            del self._trunks[shared.key]

    def _forget_name(self, name: BlockName, group: Group) -> None:
        if self._computing.get(name) is group:
            del self._computing[name]


def num_common(names: list[BlockName], others: list[BlockName]) -> int:
    """Returns the number of leading blocks with equal names. A name depends on all blocks before it, so binary search
    finds the first difference."""
    indices = range(min(len(names), len(others)))
    return bisect_left(indices, True, key=lambda index: names[index] != others[index])
