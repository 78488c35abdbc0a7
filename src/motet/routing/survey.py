"""The workers that could get a group, as `choose` sees them: books, cached prefixes and sessions put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.block_names import named_blocks
from motet.engines.base import Worker
from motet.routing.candidate import Candidate, Wanted, Work
from motet.routing.fleet import Fleet, Member
from motet.routing.load import Load
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
    ready = {
        member.id: (member, member.worker)
        for member in fleet.ready(work)
        if member.worker is not None and member.id not in besides
    }
    if not ready:
        return None
    # Those that exchange KV have blocks of one size, and the others' prefixes are counted in the first one's.
    size = next(iter(ready.values()))[1].engine.info.block_size
    overlap = fleet.index.overlap(named_blocks(request.prompt[:-1], size, request.cache_salt)) if fleet.index else {}
    session = fleet.sessions.worker_of(request.session_id) if request.session_id else None
    present = tuple(ready[id] for id in shortlist(list(ready), overlap, session, turn=turn))
    wanted = Wanted(
        work=work,
        choices=len(request.choices),
        prompt_tokens=len(request.prompt),
        prompt_blocks=-(-len(request.prompt) // size),
        needs_prompt=request.ticket is None,
    )
    candidates = tuple(
        _candidate(
            member,
            worker,
            overlap.get(member.id, 0) * size,
            has_session=member.id == session,
        )
        for member, worker in present
    )
    return Survey(wanted, present, candidates)


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
        has_session=has_session,
        avoid=member.refused,
    )
