"""The workers that serve one model, sorted by what they do for it.

Every decision needs this, and members change rarely. So a fleet computes it once after a change, when it is first asked
for, and a decision does not go through thousands of members.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from motet.engine import WorkerState
from motet.routing.choosing.cost import WorkKind
from motet.routing.workers.member import Member, PairKey
from motet.types import Role


@dataclass(frozen=True, eq=False)
class Roster:
    """Workers that may get the same work, found by id. Made by `roster`."""

    members: tuple[Member, ...]
    ids: tuple[str, ...]
    by_id: dict[str, Member]
    block_kinds: frozenset[tuple[int, str]]
    """The block sizes of all members that have ever been up, each with the name of their weights in names of blocks."""

    def without(self, ids: Collection[str]) -> "Roster":
        """Returns the roster without these members; ids that are not in it change nothing."""
        if not any(id in self.by_id for id in ids):
            return self
        return roster(member for member in self.members if member.id not in ids)

    def of_model(self, digest: str) -> "Roster":
        """Returns the roster without members that report another `model_digest`; an empty digest excludes nobody."""
        others = [member.id for member in self.members if not member.may_go_on(digest)] if digest else []
        return self.without(others)


def roster(members: Iterable[Member]) -> Roster:
    by_id = {member.id: member for member in members}
    return Roster(
        members=tuple(by_id.values()),
        ids=tuple(by_id),
        by_id=by_id,
        block_kinds=frozenset((one.block_size, one.block_weights) for one in by_id.values() if one.block_size),
    )


DECODING = (Role.DECODE, Role.BOTH)


@dataclass(frozen=True)
class ModelServing:
    """Made by `serving`. Workers that have not said yet what they serve count as expected, and get nothing."""

    prefill: Roster
    generate: Roster
    """Workers that are ready to write choices; prefill workers only if nobody else can."""
    paired_prefill: Roster
    """The workers of `prefill` whose KV a ready decode worker can fetch."""
    readers: dict[PairKey, Roster]
    """Ready workers that write choices and fetch KV, by the key that they share with the KV's makers."""
    ticket_readers: int
    """Number of readers that a ticket may have, whoever of `paired_prefill` makes it."""
    shares_prompts: bool
    """True if all workers of `generate` let groups share a prompt that they are still computing."""
    has_decode: bool
    """True if a decode worker is known, up or not."""
    has_prefill: bool
    """True if prefill and decode are apart: workers of both kinds are known, up or not."""
    hopeful: bool
    """True if a worker that could write choices is up or may come back."""

    def ready(self, work: WorkKind) -> tuple[Member, ...]:
        return (self.prefill if work is WorkKind.PREFILL else self.generate).members


def serving(members: Iterable[Member], model: str) -> ModelServing:
    """Sorts the members that take tokens and have the model."""
    maybe = [member for member in members if not member.text and member.may_have(model)]
    has_decode = any(member.role in DECODING for member in maybe)
    ready = [member for member in maybe if member.state is WorkerState.READY and member.has(model)]
    prefill = [member for member in ready if member.role is Role.PREFILL]
    readers: dict[PairKey, list[Member]] = {}
    for member in ready:
        if member.fetches and member.pair_key is not None:
            readers.setdefault(member.pair_key, []).append(member)
    paired = [member for member in prefill if member.pair_key in readers]
    generate = roster(member for member in ready if not has_decode or member.role is not Role.PREFILL)
    return ModelServing(
        prefill=roster(prefill),
        generate=generate,
        paired_prefill=roster(paired),
        readers={key: roster(members) for key, members in readers.items()},
        ticket_readers=min((member.ticket_readers for member in paired), default=1),
        shares_prompts=bool(generate.members) and all(member.shares_prompts for member in generate.members),
        has_decode=has_decode,
        has_prefill=has_decode and any(member.role is Role.PREFILL for member in maybe),
        hopeful=any(not member.given_up for member in maybe if not has_decode or member.role is not Role.PREFILL),
    )
