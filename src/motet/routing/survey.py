"""The workers that could get a group, as `choose` sees them: books, cached prefixes and sessions put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.block_names import named_blocks
from motet.engines.base import Worker
from motet.routing.candidate import Candidate, Wanted, Work
from motet.routing.eligible import eligible
from motet.routing.fleet import Fleet
from motet.routing.load import Load
from motet.routing.member import Member
from motet.routing.roster import Roster
from motet.routing.shortlist import shortlist
from motet.types import GenerateRequest


@dataclass(frozen=True)
class Survey:
    """Of one group at one moment."""

    wanted: Wanted
    present: tuple[tuple[Member, Worker], ...]
    """Those looked at; at least one."""
    candidates: tuple[Candidate, ...]
    """The same, in the same order."""

    def load(self, place: int) -> Load:
        member, candidate = self.present[place][0], self.candidates[place]
        own_tokens = self.wanted.prompt_tokens - candidate.cached_tokens
        return Load(own_tokens, member.books.waiting_tokens, member.books.tokens_per_s)


def survey(
    fleet: Fleet, work: Work, request: GenerateRequest, *, besides: Sequence[str] = (), turn: int = 0
) -> Survey | None:
    """None: nobody is ready. `besides`: workers that are not looked at."""
    able = eligible(fleet, work, request).without(besides)
    cached = _cached_blocks(fleet, request, able)
    session = fleet.sessions.worker_of(request.session_id) if request.session_id else None
    short = [able.by_id[id] for id in shortlist(able.ids, cached, session, able=able.by_id, turn=turn)]
    present = tuple((member, member.worker) for member in short if member.worker is not None)
    if not present:
        return None
    wanted = Wanted(
        work=work,
        choices=len(request.choices),
        prompt_tokens=len(request.prompt),
        needs_prompt=request.ticket is None,
    )
    candidates = tuple(
        _candidate(member, worker, cached.get(member.id, 0) * member.block_size, has_session=member.id == session)
        for member, worker in present
    )
    return Survey(wanted, present, candidates)


def _cached_blocks(fleet: Fleet, request: GenerateRequest, able: Roster) -> dict[str, int]:
    """By worker, of those that have any of the prompt; who has more of it comes later. A block of another size has
    another name, so each size is looked for by itself, as far as somebody has it."""
    if not fleet.index:
        return {}
    adapter = fleet.adapter(request.model)
    found = [
        (size, fleet.index.overlap(named_blocks(request.prompt[:-1], size, request.cache_salt, adapter)))
        for size in able.block_sizes
    ]
    if len(found) == 1:
        return found[0][1]
    every = ((blocks * size, id, blocks) for size, cached in found for id, blocks in cached.items())
    return {id: blocks for _, id, blocks in sorted(every)}


def _candidate(member: Member, worker: Worker, cached_tokens: int, *, has_session: bool) -> Candidate:
    books, info = member.books, worker.engine.info
    return Candidate(
        id=member.id,
        cached_tokens=cached_tokens,
        queued_tokens=books.waiting_tokens,
        open_choices=member.open_choices,
        trunk_blocks=books.trunk_blocks,
        tail_blocks=books.tail_blocks,
        max_choices=info.max_num_seqs,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        has_session=has_session,
        avoid=member.refused,
    )
