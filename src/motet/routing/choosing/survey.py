"""Collects what `choose` compares for a group: the workers that could get it, with loads, cached prefixes and sessions.

    eligible    the workers that may do this work for the group, by model, role, and KV that they can fetch or provide
    shortlist   the eligible workers that are compared: all of them, up to `COMPARE_ALL`. Among more, the workers with
                the longest cached prefixes, the session's last worker, and a window of all workers, which differs from
                turn to turn. So a decision takes as long with 1000 workers as with 100

The least loaded of 64 is nearly as good as the least loaded of all (Mitzenmacher, "The power of two choices in
randomized load balancing", 2001; docs/log.md for figures)."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from motet.block_names import BlockName
from motet.engine import Worker
from motet.engine_info import EngineKind
from motet.routing.choosing.cost import Candidate, GroupNeeds, has_capacity
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.routing.workers.serving import NamedBlocks, Roster, WorkKind, named_blocks_of, roster
from motet.routing.workers.worker_load import PromptBacklog
from motet.routing.workers.worker_share import WaitingWeights
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest

COMPARE_ALL = 128
"""Up to this number of workers, all are compared."""
WINDOW = 64
LONGEST = 16
"""Number of workers with the longest cached prefixes that are compared in addition to the window."""
GOLDEN_RATIO = 0.618033988749895
"""The window of a turn starts at (turn x this) modulo 1, as a share of the workers. So the starts of any number of
turns are evenly spread and never repeat."""
NO_WORKERS = roster((), "")


@dataclass(frozen=True)
class PromptOverlap:
    """The leading blocks of one prompt that workers have, for one block size and one name of the weights."""

    block_size: int
    blocks: dict[str, int]
    """Number of the prompt's leading blocks that each worker has, ascending. Workers without any are left out."""


@dataclass(frozen=True)
class Survey:
    """The workers for one group at one moment."""

    needs: GroupNeeds
    compared: tuple[tuple[Member, Worker], ...]
    """The workers that are compared, at least one."""
    candidates: tuple[Candidate, ...]
    """The same workers in the same order, as input of `choose`."""

    def backlog(self, index: int) -> PromptBacklog:
        """Returns the backlog of the group's prompt on the worker at this index of `compared`."""
        own_tokens = self.needs.prompt_tokens - self.candidates[index].cached_tokens
        return self.compared[index][0].load.prompts.backlog(own_tokens)


def survey(
    fleet: Fleet, work: WorkKind, *, request: GenerateRequest, excluding: Sequence[str] = (), turn: int = 0
) -> Survey | None:
    """Returns None if no eligible worker is ready. `excluding`: ids of workers that are left out."""
    able = eligible(fleet, work, request=request).without(excluding)
    overlaps = _overlaps(fleet, request, able=able)
    blocks = [overlap.blocks for overlap in overlaps]
    session = fleet.sessions[work].worker_of(request.session_id)
    listed = [able.by_id[id] for id in shortlist(able.ids, blocks, session=session, able=able.by_id, turn=turn)]
    compared = tuple((member, member.worker) for member in listed if member.worker is not None)
    if not compared:
        return None
    choices, tokens = len(request.choices), len(request.prompt)
    needs = GroupNeeds(
        work=work,
        choices=choices,
        prompt_tokens=tokens,
        needs_prompt=request.ticket is None,
        max_tokens=request.sampling.max_tokens,
    )
    last = tokens - 1
    candidates = []
    for member, worker in compared:
        known = (min(overlap.blocks.get(member.id, 0) * overlap.block_size, last) for overlap in overlaps)
        cached_tokens = max(known, default=0)
        candidates.append(_candidate(member, worker, cached_tokens=cached_tokens, has_session=member.id == session))
    if work is WorkKind.GENERATE and not any(has_capacity(one, needs) for one in candidates if not one.avoid):
        weights = WaitingWeights(fleet.waiting_weights)
        shares = [weights.share_of(request.client, request.client_weight, member=member) for member, _ in compared]
        candidates = [replace(one, share=share) for one, share in zip(candidates, shares, strict=True)]
    return Survey(needs, compared, tuple(candidates))


def _overlaps(fleet: Fleet, request: GenerateRequest, *, able: Roster) -> list[PromptOverlap]:
    """Returns the blocks of the prompt that workers have cached, and the blocks that they hold for open groups. The
    name of a block depends on its size, the weights and the adapter, so each kind is looked up separately."""
    overlaps = []
    for kind in able.named_blocks if fleet.cached_blocks or fleet.open_blocks else ():
        names = _names(request, fleet, kind=kind)
        usable = names[: (len(request.prompt) - 1) // kind.size]  # the last token is computed whatever is cached
        overlaps += [
            PromptOverlap(kind.size, fleet.cached_blocks.overlap(usable)),
            PromptOverlap(kind.size, fleet.open_blocks.overlap(names)),
        ]
    return [overlap for overlap in overlaps if overlap.blocks]


def trunk_of(request: GenerateRequest, fleet: Fleet, *, member: Member) -> Sequence[BlockName]:
    """Returns the names of the blocks that the member's engine has for the group's prompt. The blocks of a prompt that
    is not shared with other groups have names that no other group uses."""
    if not member.facts.shares_prompts:
        own = f"{request.request_id}/".encode()
        return [own + str(block).encode() for block in range(-(-len(request.prompt) // member.facts.block_size))]
    return _names(request, fleet, kind=named_blocks_of(member, request.model))


def _names(request: GenerateRequest, fleet: Fleet, *, kind: NamedBlocks) -> Sequence[BlockName]:
    return fleet.last_prompt.names(
        request.prompt, kind.size, salt=request.cache_salt, adapter=kind.adapter, weights=kind.weights
    )


def _candidate(member: Member, worker: Worker, *, cached_tokens: int, has_session: bool) -> Candidate:
    load, info = member.load, worker.engine.info
    return Candidate(
        id=member.id,
        cached_tokens=cached_tokens,
        queued_tokens=load.prompts.waiting_tokens,
        open_choices=load.open_choices,
        trunk_blocks=load.trunk_blocks,
        tail_blocks=load.tail_blocks,
        max_choices=info.max_num_seqs,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        has_session=has_session,
        avoid=member.faults.refused,
    )


def eligible(fleet: Fleet, work: WorkKind, *, request: GenerateRequest) -> Roster:
    """Returns the workers that may do this work for the group now. If there are decode workers, only workers whose KV a
    decode worker can fetch prefill a prompt; a server that only prefills serves any reader. A group that has output
    tokens stays with the weights that generated them."""
    serving = fleet.catalog.serving(request.model)
    if work is WorkKind.PREFILL:
        able = serving.paired_prefill if serving.has_decode else serving.prefill
    elif request.ticket is None:
        able = serving.generate
    else:
        able = readers_of(request.ticket, fleet, model=request.model)
    return able.with_weights(fleet.successors.present(request.model_digest))


def readers_of(ticket: Ticket, fleet: Fleet, *, model: str) -> Roster:
    """Returns the ready workers that have the model and can read the ticket: the workers that pair with its maker. If
    its maker is a Motet engine that is not a member, any Motet engine may read it."""
    serving = fleet.catalog.serving(model)
    maker = fleet.catalog.maker(ticket.remote_engine_id)
    if maker is not None and (key := maker.pair_key(model)) is not None:
        return serving.readers.get(key, NO_WORKERS)
    if ticket.foreign:  # the maker has been restarted, or has left: the blocks are gone
        return NO_WORKERS
    return roster((one for one in serving.generate.members if one.facts.kind is EngineKind.MOTET), model)


def shortlist(
    ids: Sequence[str], overlaps: Sequence[dict[str, int]], *, session: str | None, able: Container[str], turn: int
) -> Sequence[str]:
    """Returns the workers among `ids` that are compared. `overlaps`: known blocks of the prompt by worker, ascending.
    `session`: the session's last worker. Both can name other workers. `able`: `ids`, for fast lookups."""
    if len(ids) <= COMPARE_ALL:
        return ids
    first = int(turn * GOLDEN_RATIO % 1.0 * len(ids))
    window = [ids[(first + step) % len(ids)] for step in range(WINDOW)]
    special = [id for overlap in overlaps for id in islice((id for id in reversed(overlap) if id in able), LONGEST)]
    if session is not None and session in able:
        special.append(session)
    return list(dict.fromkeys([*special, *window]))
