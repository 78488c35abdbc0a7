"""Trunks that change workers: leases on what was prefilled for others, pulls of what others prefilled for us.

    prefilled group ──► lease ──► readers done, released or expired ──► blocks free (and findable by prefix)
    group with a ticket ──► pull ──► landed: its trunk is computed        ──► runs its last prompt token
                                └──► failed: it waits again, ticketless   ──► computes its prompt

A pull holds the blocks it writes into by itself, beside its group, and gives them back only when nothing can write into
them any more: a transfer whose peer hangs may go on long after its group is gone.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from motet.engines.native.counters import Counters
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.sequence import Group, blocks_for
from motet.errors import RequestError
from motet.ids import RequestId
from motet.transfer.base import (
    Failed,
    FailureKind,
    Landed,
    Met,
    News,
    PullOrder,
    ReaderDone,
    ReaderWaits,
    Settled,
    Transfers,
)
from motet.transfer.figures import TransferFigures
from motet.transfer.lease import Lease, LeaseTable
from motet.transfer.ticket import Ticket, prompt_digest

logger = logging.getLogger(__name__)


@dataclass
class Fetching:
    """A transfer under way, and the blocks it may write into."""

    blocks: list[int]
    group: Group | None
    """None once the group has gone on without it."""


@dataclass
class Arrivals:
    """What the core has to follow up."""

    landed: list[Group] = field(default_factory=list)
    """Their trunks are here, as far as the ticket went."""
    failed: list[Group] = field(default_factory=list)
    """They must wait again, in other blocks."""
    met: list[Met] = field(default_factory=list)


@dataclass(frozen=True)
class HandoverTerms:
    block_size: int
    lease_s: float
    clock: Callable[[], float]


class Handover:
    """The books of leases and pulls; owned by the engine core, and the `TrunkSource` of its scheduler."""

    def __init__(
        self,
        transfers: Transfers,
        pool: BlockPool,
        counters: Counters,
        terms: HandoverTerms,
        *,
        settle: Callable[[], None],
    ) -> None:
        """`settle`: returns once all that was run is in memory, and nothing that was run reads or writes any more."""
        self.transfers = transfers
        self.figures = TransferFigures(terms.clock)
        """Of pulls that landed."""
        self.leases = LeaseTable(pool.proof, seconds=terms.lease_s)
        self._pool = pool
        self._counters = counters
        self._block_size = terms.block_size
        self._clock = terms.clock
        self._settle_memory = settle
        self._numbers = count()
        self._pulls: dict[int, Fetching] = {}

    @property
    def pulls_open(self) -> int:
        return len(self._pulls)

    @property
    def blocks_pulling(self) -> int:
        """Blocks of pulls whose group is gone."""
        return sum(len(pull.blocks) for pull in self._pulls.values() if pull.group is None)

    @property
    def oldest_lease_s(self) -> float | None:
        return self.leases.oldest_s(self._clock())

    def tables(self) -> Iterable[list[int]]:
        """What leases and pulls hold, for the books."""
        return [*map(list, self.leases.tables()), *(pull.blocks for pull in self._pulls.values())]

    @property
    def wake_s(self) -> float | None:
        """When `take_news` should be called although there is no news: a lease ends, or a line of log is due."""
        return min((at for at in (self.leases.next_end_s(), self.figures.line_due_s) if at is not None), default=None)

    def check_open(self) -> None:
        """RequestError for an engine that hands nothing over."""
        _ = self.transfers.address

    def expect(self, group: Group) -> None:
        """A group with a ticket has come in. RequestError if the ticket is not for its prompt."""
        ticket = group.request.ticket
        if ticket is None:
            return
        own = ticket.remote_engine_id == self.transfers.address.engine_id
        check_ticket(ticket, group.prompt, self._block_size)
        if own or group.request.sampling.prompt_logprobs is not None:
            # What we have prefilled ourselves is in the prefix cache; and who wants the logits of every prompt token
            # cannot do with their KV.
            self.release(ticket)
            return
        if not self.transfers.believes(ticket):
            self._count_failure(FailureKind.REFUSED)
            logger.warning("the prompt of %s is computed here: its ticket has not our cluster's seal", _label(group))
            return
        group.ticket = ticket
        self.transfers.expect(ticket)

    def fetch(self, group: Group) -> None:
        """Orders what the prefix cache lacks; see `TrunkSource`."""
        ticket = group.ticket
        if ticket is None:
            return
        hits = group.published
        missing = range(hits, len(ticket.remote_block_ids))
        self._counters.pull_blocks_avoided += hits
        if not missing:
            self._counters.pulls_avoided += 1
            self.give_up(group)
            return
        pairs = tuple((ticket.remote_block_ids[i], ticket.generations[i], group.blocks[i]) for i in missing)
        pull = Fetching([local for _, _, local in pairs], group)
        self._pool.share(pull.blocks)
        group.pull = next(self._numbers)
        self._pulls[group.pull] = pull
        self._settle_memory()  # a GPU may still be at work on who had these blocks before
        self.transfers.pull(PullOrder(group.pull, ticket, pairs, _label(group)))

    def give_up(self, group: Group) -> None:
        """See `TrunkSource`."""
        if group.pull is not None:
            self._pulls[group.pull].group = None
            self.transfers.abandon(group.pull)
        elif group.ticket is not None:
            self.transfers.release(group.ticket)
        group.pull = group.ticket = None

    @property
    def has_room(self) -> bool:
        """Whether another lease can be granted now."""
        return self._pool.proof.has_room

    def grant(self, group: Group, blocks: list[int]) -> Ticket:
        """The ticket for a group whose prompt is prefilled. A lease holds its blocks from now on."""
        self._settle_memory()
        address = self.transfers.address
        lease = self.leases.grant(group.request.request_id, blocks, readers=group.readers, now_s=self._clock())
        self._count_leases()
        self._counters.prefills += 1
        logger.info("prefilled %s for %d: %d tokens", _label(group), group.readers, group.trunk_tokens)
        ticket = Ticket(
            remote_engine_id=address.engine_id,
            remote_request_id=group.request.request_id,
            remote_host=address.host,
            remote_port=address.port,
            remote_block_ids=tuple(blocks),
            num_tokens=group.trunk_tokens,
            prompt_digest=prompt_digest(group.prompt[: group.trunk_tokens]),
            generations=self._pool.proof.generations(blocks),
            lease_id=lease.lease_id,
            lease_slot=lease.slot,
            lease_s=self.leases.seconds,
            readers=group.readers,
            cached_tokens=group.cached_tokens or 0,
        )
        self.leases.bind(lease, ticket.digest)
        return self.transfers.sealed(ticket)

    def release(self, ticket: Ticket) -> None:
        """Ends the lease of a ticket, ours or another worker's. An engine that hands nothing over can tell nobody."""
        with contextlib.suppress(RequestError):
            if ticket.remote_engine_id == self.transfers.address.engine_id:
                self._free(self.leases.end(ticket.lease_id))
            elif self.transfers.believes(ticket):
                self.transfers.release(ticket)

    def release_request(self, request_id: RequestId) -> None:
        """Ends the lease that was granted for a request, if it is still held."""
        self._free(self.leases.end_of_request(request_id))

    def take_news(self) -> Arrivals:
        """Settles what has happened since the last step, and ends leases whose time is up."""
        arrivals = Arrivals()
        for news in self.transfers.news():
            self._settle(news, arrivals)
        for lease in self.leases.expired(self._clock()):
            self._counters.leases_expired += 1
            logger.warning("the lease of %s has expired: its readers gave no sign of life", lease.request_id)
            self._free(lease)
        if line := self.figures.take_line():
            logger.info(line)
        return arrivals

    def _settle(self, news: News, arrivals: Arrivals) -> None:
        match news:
            case Landed():
                self._landed(news, arrivals)
            case Failed():
                self._failed(news, arrivals)
            case Met():
                arrivals.met.append(news)
            case Settled(number):
                self._pool.release(self._pulls.pop(number).blocks)
            case ReaderDone(lease_id, reader):
                self._free(self.leases.reader_done(lease_id, reader))
            case ReaderWaits(lease_id):
                self.leases.reader_waits(lease_id, self._clock())

    def _landed(self, landed: Landed, arrivals: Arrivals) -> None:
        pull = self._pulls.pop(landed.number)
        self._counters.transfers += 1
        self._counters.transfer_bytes += landed.num_bytes
        self._counters.transfer_descriptors += landed.num_descriptors
        self.figures.add(landed)
        if (group := pull.group) is not None and (ticket := group.ticket) is not None:
            group.computed, group.cached_tokens = ticket.num_tokens, ticket.cached_tokens
            group.pull = group.ticket = None
            arrivals.landed.append(group)
            logger.info("fetched %s: %d bytes in %.1f ms", _label(group), landed.num_bytes, 1000 * landed.seconds)
        self._pool.release(pull.blocks)

    def _failed(self, failed: Failed, arrivals: Arrivals) -> None:
        pull = self._pulls[failed.number]
        self._count_failure(failed.kind)
        if (group := pull.group) is not None:
            logger.warning("the prompt of %s is computed here: %s", _label(group), failed.message)
            pull.group = group.pull = group.ticket = None
            arrivals.failed.append(group)
        if failed.settled:
            self._pool.release(self._pulls.pop(failed.number).blocks)

    def _count_failure(self, kind: FailureKind) -> None:
        failures = self._counters.transfer_failures
        failures[kind] = failures.get(kind, 0) + 1

    def _free(self, lease: Lease | None) -> None:
        if lease is not None:
            self._pool.release(lease.blocks)
            self._count_leases()

    def _count_leases(self) -> None:
        self.transfers.holding(len(self.leases))


def check_ticket(ticket: Ticket, prompt: tuple[int, ...], block_size: int) -> None:
    """Raises RequestError unless the ticket's KV is that of the beginning of the prompt."""
    if ticket.is_for(prompt) and len(ticket.remote_block_ids) == blocks_for(ticket.num_tokens, block_size):
        return
    raise RequestError(
        "Invalid 'kv_transfer_params': the ticket is not for this prompt.",
        param="kv_transfer_params",
        code="invalid_value",
    )


def _label(group: Group) -> str:
    """How log lines name a group."""
    request = group.request
    return f"{request.request_id} ({request.trace})" if request.trace else request.request_id
