"""The workers that could get a group, as `choose` sees them: books, cached prefixes and sessions put together.

    eligible    the workers that may do this work for the group, by model, role, and KV that they can fetch or hand over
    shortlist   those of them that are looked at: up to `EVERYBODY` all of them; of more, those that are special for
                this group and a window of the others, another one each turn. So a decision costs the same with 100
                and with 1000 workers

The least loaded of 64 is nearly as good as the least loaded of all (Mitzenmacher, "The power of two choices in
randomized load balancing", 2001; docs/log.md for figures).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice

from motet.block_names import BlockName
from motet.engine import ANSWERING, Worker
from motet.routing.choosing.cost import Candidate, GroupNeeds, WorkKind
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Load, Member
from motet.routing.workers.serving import Roster, roster
from motet.transfer.ticket import Ticket
from motet.types import EngineKind, GenerateRequest

EVERYBODY = 128
"""Up to this many workers, all are looked at."""
WINDOW = 64
LONGEST = 16
"""Number of workers with the longest cached prefixes that are looked at beside the window."""
GOLDEN = 0.618033988749895
"""Windows begin at multiples of this, modulo 1: they are spread evenly at any moment, and never repeat."""
NOBODY = roster(())


@dataclass(frozen=True)
class PromptOverlap:
    """The beginning of one prompt that workers have, in blocks of one kind."""

    size: int
    blocks: dict[str, int]
    """How many of the prompt's each worker has that has any, rising."""


@dataclass(frozen=True)
class Survey:
    """The workers for one group at one moment."""

    needs: GroupNeeds
    present: tuple[tuple[Member, Worker], ...]
    """The workers that were looked at, at least one."""
    candidates: tuple[Candidate, ...]
    """The same workers in the same order, as input of `choose`."""

    def load(self, place: int) -> Load:
        member, candidate = self.present[place][0], self.candidates[place]
        own_tokens = self.needs.prompt_tokens - candidate.cached_tokens
        return Load(own_tokens, member.books.waiting_tokens, member.books.tokens_per_s)


def survey(
    fleet: Fleet, work: WorkKind, *, request: GenerateRequest, besides: Sequence[str] = (), turn: int = 0
) -> Survey | None:
    """Returns None if no worker is ready. `besides`: ids of workers that are left out."""
    able = eligible(fleet, work, request=request).without(besides)
    overlaps = _overlaps(fleet, request, able=able)
    session = fleet.sessions[work].worker_of(request.session_id)
    longest = [one.blocks for one in overlaps]
    short = [able.by_id[id] for id in shortlist(able.ids, longest, session=session, able=able.by_id, turn=turn)]
    present = tuple((member, member.worker) for member in short if member.worker is not None)
    if not present:
        return None
    needs = GroupNeeds(
        work=work, choices=len(request.choices), prompt_tokens=len(request.prompt), needs_prompt=request.ticket is None
    )
    last = len(request.prompt) - 1
    candidates = []
    for member, worker in present:
        cached_tokens = max((min(one.blocks.get(member.id, 0) * one.size, last) for one in overlaps), default=0)
        candidates.append(_candidate(member, worker, cached_tokens=cached_tokens, has_session=member.id == session))
    return Survey(needs, present, tuple(candidates))


def _overlaps(fleet: Fleet, request: GenerateRequest, *, able: Roster) -> list[PromptOverlap]:
    """Returns the blocks that workers have cached, and those that they hold for open groups. A block of another size or
    of other weights has another name, so each kind is looked up by itself."""
    found = []
    for size, weights in able.block_kinds if fleet.index or fleet.open_blocks else ():
        names = _names(request, fleet, size=size, weights=weights)
        usable = names[: (len(request.prompt) - 1) // size]  # the last token is computed whatever is cached
        found += [
            PromptOverlap(size, fleet.index.overlap(usable)),
            PromptOverlap(size, fleet.open_blocks.overlap(names)),
        ]
    return [one for one in found if one.blocks]


def trunk_of(request: GenerateRequest, fleet: Fleet, *, member: Member) -> Sequence[BlockName]:
    """Returns the names of the blocks that the member's engine has for the group's prompt. A prompt that is shared with
    no other group has names of its own."""
    if not member.shares_prompts or request.sampling.prompt_logprobs is not None:
        own = f"{request.request_id}/".encode()
        return [own + str(block).encode() for block in range(-(-len(request.prompt) // member.block_size))]
    return _names(request, fleet, size=member.block_size, weights=member.block_weights)


def _names(request: GenerateRequest, fleet: Fleet, *, size: int, weights: str) -> Sequence[BlockName]:
    adapter = fleet.adapter(request.model)
    return fleet.last_prompt.names(request.prompt, size, salt=request.cache_salt, adapter=adapter, weights=weights)


def _candidate(member: Member, worker: Worker, *, cached_tokens: int, has_session: bool) -> Candidate:
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


def eligible(fleet: Fleet, work: WorkKind, *, request: GenerateRequest) -> Roster:
    """Returns the workers that may do this work for the group now. If there are decode workers, a prompt is prefilled
    by those whose KV one of them can fetch; a server that only prefills does it for anyone. A group that has begun
    stays with the weights that began it."""
    serving = fleet.serving(request.model)
    if work is WorkKind.PREFILL:
        able = serving.paired_prefill if serving.has_decode else serving.prefill
    elif request.ticket is None:
        able = serving.generate
    else:
        able = readers_of(request.ticket, fleet, model=request.model)
    return able.of_model(fleet.present(request.model_digest))


def readers_of(ticket: Ticket, fleet: Fleet, *, model: str) -> Roster:
    """Returns the ready workers that have the model and can read the ticket: those that pair with its maker. If a
    client brought a ticket of ours whose maker is not known here, any engine of ours may read it."""
    serving = fleet.serving(model)
    maker = fleet.maker(ticket.remote_engine_id)
    if maker is not None and maker.pair_key is not None:
        return serving.readers.get(maker.pair_key, NOBODY)
    if ticket.foreign:  # its maker has been started again, or has left: its blocks are gone
        return NOBODY
    return roster(member for member in serving.generate.members if _is_ours(member))


def releaser(ticket: Ticket, fleet: Fleet) -> Worker | None:
    """Returns a worker that can end the lease of a ticket; None if nobody can, so that it ends by itself.

    A ticket of ours is given back to its maker, or through any engine of ours, which reaches the maker over the side
    channel; a ticket of another engine through a decode worker that could read it, else through any of its kind."""
    answering = [member for member in fleet.members if member.state in ANSWERING and member.worker is not None]
    if ticket.foreign:
        others = [member for member in answering if not _is_ours(member)]
        maker = fleet.maker(ticket.remote_engine_id)
        key = None if maker is None else maker.pair_key
        able = [member for member in others if member.fetches and key in (None, member.pair_key)] or others
    else:
        ours = [member for member in answering if _is_ours(member)]
        able = [member for member in ours if member.engine_id == ticket.remote_engine_id] or ours
    return able[0].worker if able else None


def _is_ours(member: Member) -> bool:
    return member.pair_key is not None and member.pair_key.kind is EngineKind.MOTET


def shortlist(
    ids: Sequence[str], overlaps: Sequence[dict[str, int]], *, session: str | None, able: Container[str], turn: int
) -> Sequence[str]:
    """Returns the workers among `ids` that are looked at. `overlaps`: known blocks of the prompt by worker, rising;
    `session`: the last worker of the session. Both may name workers outside `ids`; `able` tells which are in it."""
    if len(ids) <= EVERYBODY:
        return ids
    first = int(turn * GOLDEN % 1.0 * len(ids))
    window = [ids[(first + step) % len(ids)] for step in range(WINDOW)]
    special = [id for one in overlaps for id in islice((id for id in reversed(one) if id in able), LONGEST)]
    if session is not None and session in able:
        special.append(session)
    return list(dict.fromkeys([*special, *window]))
