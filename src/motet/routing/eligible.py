"""Who may get a group, and its ticket. Pure: over the fleet as it is.

A ticket is read by decode workers that pair with the worker that made it, and by nobody else. One whose maker is not
known here (a client brought it, or the maker is a prefill server that this server asks) is read by engines of ours.
"""

from motet.engines.base import ANSWERING, Worker
from motet.routing.candidate import Work
from motet.routing.fleet import Fleet
from motet.routing.member import Member
from motet.routing.roster import Roster, roster
from motet.transfer.ticket import Ticket
from motet.types import EngineKind, GenerateRequest

NOBODY = roster(())


def eligible(fleet: Fleet, work: Work, request: GenerateRequest) -> Roster:
    """Those that may get such work of this group now. Where workers decode, those prefill whose KV one of them can
    fetch; a server that only prefills does it for whoever comes."""
    serving = fleet.serving(request.model)
    if work is Work.PREFILL:
        return serving.paired_prefill if serving.has_decode else serving.prefill
    return serving.generate if request.ticket is None else readers_of(request.ticket, fleet, request.model)


def readers_of(ticket: Ticket, fleet: Fleet, model: str) -> Roster:
    """Ready workers that have the model and can fetch what the ticket is for."""
    serving = fleet.serving(model)
    maker = fleet.maker(ticket.remote_engine_id)
    if maker is not None and maker.pair_key is not None:
        return serving.readers.get(maker.pair_key, NOBODY)
    if ticket.foreign:  # its maker has been started again, or has left: what it kept is gone
        return NOBODY
    return roster(member for member in serving.generate.members if _is_ours(member))


def releaser(ticket: Ticket, fleet: Fleet) -> Worker | None:
    """Who can end the lease of a ticket: of ours the worker whose lease it is, else any, for an engine reaches the
    others' leases through the side channel; of others a decode worker that could read it, else any of that kind. None:
    nobody, and the lease ends by itself."""
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
