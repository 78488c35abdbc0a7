"""The workers that serve one model, sorted by what they do for it: true until a member of the fleet changes. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from motet.engines.base import WorkerState
from motet.routing.candidate import Work
from motet.routing.member import Member
from motet.routing.pairs import PairKey
from motet.routing.roster import Roster, roster
from motet.types import Role

DECODING = (Role.DECODE, Role.BOTH)


@dataclass(frozen=True)
class Serving:
    """Made by `serving`. Workers that have not told yet what they serve count as hope, and get nothing."""

    prefill: Roster
    """Ready to prefill."""
    generate: Roster
    """Ready to write choices: prefill workers only where there is nobody else who could."""
    paired_prefill: Roster
    """Those of `prefill` whose KV a ready decode worker can fetch."""
    readers: dict[PairKey, Roster]
    """Ready workers that write choices and fetch KV, by whose they can fetch."""
    ticket_readers: int
    """How many readers a ticket may have, whoever of `paired_prefill` makes it."""
    has_decode: bool
    """Whether a worker that decodes has been heard of, up or not."""
    has_prefill: bool
    """Whether prefill and decode are apart: workers of both kinds have been heard of, up or not."""
    hopeful: bool
    """Whether a worker that could generate is there or may come back."""

    def ready(self, work: Work) -> tuple[Member, ...]:
        return (self.prefill if work is Work.PREFILL else self.generate).members


def serving(members: Iterable[Member], model: str) -> Serving:
    """Of all these members, those that take tokens and have the model."""
    maybe = [member for member in members if not member.text and member.may_have(model)]
    has_decode = any(member.role in DECODING for member in maybe)
    ready = [member for member in maybe if member.state is WorkerState.READY and member.has(model)]
    prefill = [member for member in ready if member.role is Role.PREFILL]
    readers: dict[PairKey, list[Member]] = {}
    for member in ready:
        if member.fetches and member.pair_key is not None:
            readers.setdefault(member.pair_key, []).append(member)
    paired = [member for member in prefill if member.pair_key in readers]
    return Serving(
        prefill=roster(prefill),
        generate=roster(member for member in ready if not has_decode or member.role is not Role.PREFILL),
        paired_prefill=roster(paired),
        readers={key: roster(members) for key, members in readers.items()},
        ticket_readers=min((member.ticket_readers for member in paired), default=1),
        has_decode=has_decode,
        has_prefill=has_decode and any(member.role is Role.PREFILL for member in maybe),
        hopeful=any(not member.given_up for member in maybe if not has_decode or member.role is not Role.PREFILL),
    )
