"""The workers that serve one model, sorted by what they do for it.

Every decision needs these workers, and members change rarely. So the catalog of a fleet sorts them once after a change,
at the first query, and a decision does not iterate over thousands of members.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from motet.engine import WorkerState
from motet.routing.workers.member import Member
from motet.routing.workers.worker_facts import PairKey
from motet.types import Role


class WorkKind(Enum):
    """The kind of work that a worker is chosen for."""

    PREFILL = auto()
    GENERATE = auto()


@dataclass(frozen=True, eq=False)
class Roster:
    """Workers that may get the same work, found by id. Made by `roster`."""

    members: tuple[Member, ...]
    ids: tuple[str, ...]
    by_id: dict[str, Member]
    block_kinds: frozenset[tuple[int, str]]
    """Block size and name of the weights in block names, for each member that has ever been reached."""

    def without(self, ids: Collection[str]) -> "Roster":
        """Returns the roster without these members. Ids that are not in it change nothing."""
        if not any(id in self.by_id for id in ids):
            return self
        return roster(member for member in self.members if member.id not in ids)

    def with_weights(self, model_digest: str) -> "Roster":
        """Returns the roster without members that report weights with another digest. With an empty digest it returns
        all members."""
        others = [member.id for member in self.members if not member.has_weights(model_digest)] if model_digest else []
        return self.without(others)


def roster(members: Iterable[Member]) -> Roster:
    by_id = {member.id: member for member in members}
    facts = [member.facts for member in by_id.values()]
    return Roster(
        members=tuple(by_id.values()),
        ids=tuple(by_id),
        by_id=by_id,
        block_kinds=frozenset((one.block_size, one.block_weights) for one in facts if one.block_size),
    )


DECODING = (Role.DECODE, Role.BOTH)


@dataclass(frozen=True)
class ModelServing:
    """The workers for one model, made by `serving`. A worker that has not reported its models yet counts as expected,
    and gets no groups."""

    prefill: Roster
    generate: Roster
    """Workers that are ready to generate choices. Prefill workers are among them only if there is no other worker."""
    paired_prefill: Roster
    """The workers of `prefill` whose KV a ready decode worker can fetch."""
    readers: dict[PairKey, Roster]
    """Ready workers that generate choices and fetch KV, by the key that they share with the workers that compute it."""
    ticket_readers: int
    """Maximum number of readers of a ticket, no matter which worker of `paired_prefill` makes it."""
    shares_prompts: bool
    """True if all workers of `generate` let groups share a prompt that is still being computed."""
    has_decode: bool
    """True if a decode worker is known, available or not."""
    has_prefill: bool
    """True if prefill and decode are separate: workers of both kinds are known, available or not."""
    worker_expected: bool
    """True if a worker that could generate choices is available, or is expected to return."""

    def ready(self, work: WorkKind) -> tuple[Member, ...]:
        return (self.prefill if work is WorkKind.PREFILL else self.generate).members


def serving(members: Iterable[Member], model: str) -> ModelServing:
    """Sorts the members that take tokens and have the model."""
    expected = [member for member in members if not member.facts.takes_texts and member.models.may_have(model)]
    has_decode = any(member.facts.role in DECODING for member in expected)
    ready = [member for member in expected if member.state is WorkerState.READY and member.models.has(model)]
    prefill = [member for member in ready if member.facts.role is Role.PREFILL]
    readers: dict[PairKey, list[Member]] = {}
    for member in ready:
        if member.facts.can_fetch and member.facts.pair_key is not None:
            readers.setdefault(member.facts.pair_key, []).append(member)
    paired = [member for member in prefill if member.facts.pair_key in readers]
    generate = roster(member for member in ready if not has_decode or member.facts.role is not Role.PREFILL)
    return ModelServing(
        prefill=roster(prefill),
        generate=generate,
        paired_prefill=roster(paired),
        readers={key: roster(members) for key, members in readers.items()},
        ticket_readers=min((member.facts.ticket_readers for member in paired), default=1),
        shares_prompts=bool(generate.members) and all(member.facts.shares_prompts for member in generate.members),
        has_decode=has_decode,
        has_prefill=has_decode and any(member.facts.role is Role.PREFILL for member in expected),
        worker_expected=any(
            not member.given_up for member in expected if not has_decode or member.facts.role is not Role.PREFILL
        ),
    )
