"""The workers that serve one model, sorted by what they do for it (`ModelServing`), and the catalog of a fleet: its
workers by model, its models, and the makers of tickets (`Catalog`).

Every decision needs these workers, and members change rarely. So the catalog sorts them once after a change, at the
first query, and a decision does not iterate over thousands of members."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from motet.engine import WorkerState
from motet.engine_info import ModelCard
from motet.ids import ModelName
from motet.routing.workers.member import Member
from motet.routing.workers.worker_facts import PairKey
from motet.types import Role


class WorkKind(Enum):
    """The kind of work that a worker is chosen for."""

    PREFILL = auto()
    GENERATE = auto()


class NamedBlocks(NamedTuple):
    """The facts about a worker on which the names of a prompt's blocks depend, in addition to the prompt."""

    size: int
    """Number of tokens of a block."""
    weights: str
    """`EngineInfo.block_weights`."""
    adapter: str
    """See `Member.adapter_in_names`."""


@dataclass(frozen=True, eq=False)
class Roster:
    """Workers that may get the same work. Made by `roster`."""

    members: tuple[Member, ...]
    ids: tuple[str, ...]
    by_id: dict[str, Member]
    model: str
    """The model for which the members may get work; empty for any model."""
    named_blocks: frozenset[NamedBlocks]
    """Kinds of the members' blocks: a prompt has other block names for each kind."""

    def without(self, ids: Collection[str]) -> "Roster":
        """Returns the roster without these members. Ids that are not in it change nothing."""
        if not any(id in self.by_id for id in ids):
            return self
        return roster((member for member in self.members if member.id not in ids), self.model)

    def with_weights(self, model_digest: str) -> "Roster":
        """Returns the members that report no weights or these weights. An empty digest returns all."""
        if not model_digest:
            return self
        return self.without([one.id for one in self.members if not one.has_weights(model_digest, model=self.model)])


def roster(members: Iterable[Member], model: str) -> Roster:
    by_id = {member.id: member for member in members}
    return Roster(
        members=tuple(by_id.values()),
        ids=tuple(by_id),
        by_id=by_id,
        model=model,
        named_blocks=frozenset(named_blocks_of(member, model) for member in by_id.values() if member.facts.block_size),
    )


def named_blocks_of(member: Member, model: str) -> NamedBlocks:
    return NamedBlocks(member.facts.block_size, member.facts.block_weights, member.adapter_in_names(model))


@dataclass(frozen=True)
class ModelServing:
    """The workers for one model. A worker that has not reported its models counts as expected, and gets no groups."""

    prefill: Roster
    generate: Roster
    """Workers that are ready to generate choices. Includes prefill workers only if no other worker is ready."""
    paired_prefill: Roster
    """The workers of `prefill` whose KV a ready decode worker can fetch."""
    readers: dict[PairKey, Roster]
    """Ready workers that fetch KV, by `PairKey`. They can fetch it from prefill workers with the same key."""
    ticket_readers: int
    """Maximum number of readers of a ticket, no matter which worker of `paired_prefill` makes it."""
    shares_prompts: bool
    """True if all workers of `generate` let groups share a prompt that is still being computed."""
    has_decode: bool
    """True if a decode worker is known, available or not."""
    has_prefill: bool
    """True if workers of both kinds are known, available or not: prefill and decode are separate."""
    worker_expected: bool
    """True if a worker that could generate choices is available, or is expected to return."""


def serving(members: Iterable[Member], model: str) -> ModelServing:
    """Sorts the members that take tokens and have the model."""
    expected = [member for member in members if not member.facts.takes_texts and member.models.may_have(model)]
    has_decode = any(member.facts.role in (Role.DECODE, Role.BOTH) for member in expected)
    ready = [member for member in expected if member.state is WorkerState.READY and member.models.has(model)]
    prefill = [member for member in ready if member.facts.role is Role.PREFILL]
    readers: dict[PairKey, list[Member]] = {}
    for member in ready:
        if member.facts.can_fetch and (key := member.pair_key(model)) is not None:
            readers.setdefault(key, []).append(member)
    paired = [member for member in prefill if member.pair_key(model) in readers]
    generate = roster((member for member in ready if not has_decode or member.facts.role is not Role.PREFILL), model)
    return ModelServing(
        prefill=roster(prefill, model),
        generate=generate,
        paired_prefill=roster(paired, model),
        readers={key: roster(members, model) for key, members in readers.items()},
        ticket_readers=min((member.facts.ticket_readers for member in paired), default=1),
        shares_prompts=bool(generate.members) and all(member.facts.shares_prompts for member in generate.members),
        has_decode=has_decode,
        has_prefill=has_decode and any(member.facts.role is Role.PREFILL for member in expected),
        worker_expected=any(
            not member.given_up for member in expected if not has_decode or member.facts.role is not Role.PREFILL
        ),
    )


class Catalog:
    """Answers queries about the members. Computes each result once after a change of a member, at the first query."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        """`members`: members by id; their fleet changes them, and then calls `invalidate`."""
        self._members = members
        self._serving: dict[str, ModelServing] = {}
        """Workers by model."""
        self._makers: dict[str, Member] | None = None
        """Members that make tickets, by engine id. None if they must be computed again."""
        self._models: dict[ModelName, ModelCard] = {}
        self._models_valid = True

    def invalidate(self) -> None:
        """Called when a member has joined, left or changed."""
        self._serving.clear()
        self._makers = None
        self._models_valid = False

    def serving(self, model: str = "") -> ModelServing:
        """Returns the workers that serve the model now. Without a name, returns the workers of all models."""
        if (result := self._serving.get(model)) is None:
            result = serving(self._members.values(), model)
            if not model or model in self.models():  # names that clients invent are not cached
                self._serving[model] = result
        return result

    def ready(self, model: str = "") -> tuple[Member, ...]:
        """Returns the workers that are ready to generate choices of the model."""
        return self.serving(model).generate.members

    def texts(self, model: str) -> list[Member]:
        """Returns the members that take texts and may get a request for this model now."""
        members = [member for member in self._members.values() if member.facts.takes_texts]
        return [member for member in members if member.state is WorkerState.READY and member.models.has(model)]

    def models(self) -> Mapping[ModelName, ModelCard]:
        """Returns the models that the members serve or last served, in the order in which they were first seen, with
        the card of the first member that has it. The result is the same object until a member changes."""
        if not self._models_valid:
            served: dict[ModelName, ModelCard] = {}
            for member in self._members.values():
                for name, card in member.models.by_name.items():
                    served.setdefault(name, card)
            earlier = [name for name in self._models if name in served]
            self._models = {name: served[name] for name in dict.fromkeys((*earlier, *served))}
            self._models_valid = True
        return self._models

    def only_text(self, model: str) -> bool:
        """Returns True if only members that take texts serve the model."""
        members = [member for member in self._members.values() if model and member.models.has(model)]
        return bool(members) and all(member.facts.takes_texts for member in members)

    def base_of(self, model: str) -> ModelName | None:
        """Returns the base model of the engine that serves this model under another name, or as an adapter."""
        for member in self._members.values():
            if member.worker is not None and model and member.models.has(model):
                return member.worker.engine.info.model
        return None

    def maker(self, engine_id: str) -> Member | None:
        """Returns the member that makes tickets with this engine id, or None if no member does."""
        if self._makers is None:
            makers = ((member.facts.engine_id, member) for member in self._members.values())
            self._makers = {id: member for id, member in makers if id is not None}
        return self._makers.get(engine_id)
