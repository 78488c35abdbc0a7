"""Trunks that move between workers: leases on blocks prefilled for others, pulls of blocks that others prefilled.

    prefilled group ──► lease ──► readers done, released or expired ──► blocks free (and findable by prefix)
    group with a ticket ──► pull ──► landed: its trunk is computed        ──► runs its last prompt token
                                └──► failed: it waits again, ticketless   ──► computes its prompt

A pull itself holds the blocks that it writes into, as its group does, and gives them back only when nothing can write
into them any more: a transfer whose peer hangs may go on long after its group is gone.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.step.sequence import Group, blocks_for
from motet.errors import RequestError
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.transfer import orders
from motet.transfer.figures import TransferFigures
from motet.transfer.lease import Lease, LeaseTable, new_lease_id
from motet.transfer.orders import FailureKind
from motet.transfer.ticket import Ticket, prompt_digest
from motet.types import PullReport

if TYPE_CHECKING:  # an engine that keeps its KV to itself needs no ZeroMQ for it
    from motet.transfer.thread import TransferThread

logger = logging.getLogger(__name__)

KEEPS_KV = "this engine keeps its KV cache to itself: only servers started with --role prefill or decode hand it over"


@dataclass
class OpenPull:
    """A transfer under way, and the blocks it may write into."""

    blocks: list[int]
    group: Group | None
    """None once the group has gone on without the pull."""
    start_ns: int = field(default_factory=time.time_ns)
    """Unix time of its order, for traces."""

    def report(self, end_ns: int, *, num_bytes: int = 0, failure: str = "") -> PullReport:
        return PullReport(self.start_ns, end_ns, num_bytes, failure)


@dataclass
class Arrivals:
    """The results of transfers since the last step, which the core must act on."""

    landed: list[Group] = field(default_factory=list)
    """Groups whose trunks are here, as far as their tickets covered them."""
    failed: list[Group] = field(default_factory=list)
    """Groups that must wait again, in other blocks."""
    met: list[orders.Met] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class Handover:
    """The books of leases and pulls. The core owns them; the scheduler asks them where a trunk can come from."""

    transfers: "TransferThread | None"
    """None for an engine that hands nothing over."""
    pool: BlockPool
    counters: EngineStats
    block_size: int
    lease_s: float
    clock: Callable[[], float]
    settle: Callable[[], None]
    """Returns once the results of all runs are in memory, and no run reads or writes any more."""

    def __post_init__(self) -> None:
        self.weights = ""
        """Names the weights whose KV is made and used here."""
        self.leases = LeaseTable(self.pool.proof, seconds=self.lease_s)
        self._figures = TransferFigures(self.clock)
        self._numbers = count()
        self._pulls: dict[int, OpenPull] = {}

    def tell_gauges(self, stats: EngineStats) -> None:
        """Writes the gauges of this moment into `stats`."""
        stats.leases = len(self.leases)
        stats.oldest_lease_s = self.leases.oldest_s(self.clock())
        stats.pulls_open = len(self._pulls)
        stats.blocks_pulling = sum(len(pull.blocks) for pull in self._pulls.values() if pull.group is None)
        stats.transfer_seconds = tuple(self._figures.counts)
        stats.transfer_seconds_sum = self._figures.seconds_sum

    def tables(self) -> list[Sequence[int]]:
        """Returns the blocks of every lease and pull, which the pool's books must account for."""
        return [*self.leases.tables(), *(pull.blocks for pull in self._pulls.values())]

    @property
    def wake_s(self) -> float | None:
        """The time at which `take_news` must be called even without news: a lease ends, or a log line is due."""
        return min((at for at in (self.leases.next_end_s(), self._figures.line_due_s) if at is not None), default=None)

    def check_open(self) -> "TransferThread":
        """Returns the transfers. Raises RequestError for an engine that hands nothing over."""
        if self.transfers is None:
            raise RequestError(KEEPS_KV, param="kv_transfer_params")
        return self.transfers

    def expect(self, group: Group) -> None:
        """Keeps the lease of a new group's ticket alive. Raises RequestError if the ticket is for another prompt."""
        ticket = group.request.ticket
        if ticket is None:
            return
        transfers = self.check_open()
        own = ticket.remote_engine_id == transfers.address.engine_id
        check_ticket(ticket, group.prompt, block_size=self.block_size)
        if own or group.request.sampling.prompt_logprobs is not None:
            # Our own prefilled blocks are in the prefix cache; and logits of prompt tokens do not follow from KV.
            self.release(ticket)
            return
        if not transfers.key.believes(ticket):
            self._count_failure(FailureKind.REFUSED)
            logger.warning("the prompt of %s is computed here: its ticket lacks our cluster's seal", _label(group))
            return
        if ticket.weights != self.weights:
            self._count_failure(FailureKind.WEIGHTS)
            logger.warning("the prompt of %s is computed here: its ticket is for KV of other weights", _label(group))
            self.release(ticket)
            return
        group.ticket = ticket
        transfers.order(orders.KeepAlive(ticket))

    def fetch(self, group: Group) -> None:
        """Starts the pull for a group with a ticket that has its blocks now: of all uncached blocks."""
        ticket = group.ticket
        if ticket is None:
            return
        hits = group.published
        missing = range(hits, len(ticket.remote_block_ids))
        self.counters.pull_blocks_avoided += hits
        if not missing:
            self.counters.pulls_avoided += 1
            self.give_up(group)
            return
        pairs = tuple((ticket.remote_block_ids[i], ticket.generations[i], group.blocks[i]) for i in missing)
        pull = OpenPull([local for _, _, local in pairs], group)
        self.pool.share(pull.blocks)
        group.pull = next(self._numbers)
        self._pulls[group.pull] = pull
        self.settle()  # a GPU may still be writing for the group that had these blocks before
        self.check_open().order(orders.PullOrder(group.pull, ticket, pairs, _label(group)))

    def give_up(self, group: Group) -> None:
        """Called when a group will not use its ticket, or is about to lose the blocks that are being fetched."""
        if group.pull is not None:
            self._pulls[group.pull].group = None
            self.check_open().order(orders.AbandonPull(group.pull))
        elif group.ticket is not None:
            self.check_open().order(orders.ReleaseTicket(group.ticket))
        group.pull = group.ticket = None

    def grant(self, group: Group, blocks: list[int]) -> Ticket:
        """Returns the ticket for a group whose prompt is prefilled. A lease holds its blocks from now on."""
        self.settle()
        transfers = self.check_open()
        proof, address = self.pool.proof, transfers.address
        ticket = Ticket(
            remote_engine_id=address.engine_id,
            remote_request_id=group.request.request_id,
            remote_host=address.host,
            remote_port=address.port,
            remote_block_ids=tuple(blocks),
            num_tokens=group.trunk_tokens,
            prompt_digest=prompt_digest(group.prompt[: group.trunk_tokens]),
            generations=proof.generations(blocks),
            lease_id=new_lease_id(),
            lease_slot=proof.take_slot(),
            lease_s=self.leases.seconds,
            readers=group.readers,
            cached_tokens=group.cached_tokens or 0,
            weights=self.weights,
        )
        self.leases.grant(ticket, now_s=self.clock())
        self._tell_leases()
        self.counters.prefills += 1
        logger.info("prefilled %s for %d: %d tokens", _label(group), group.readers, group.trunk_tokens)
        return transfers.key.sealed(ticket)

    def release(self, ticket: Ticket) -> None:
        """Ends the lease of a ticket, ours or another worker's. An engine that hands nothing over does nothing."""
        if self.transfers is None:
            return
        if ticket.remote_engine_id == self.transfers.address.engine_id:
            self._free(self.leases.end(ticket.lease_id))
        elif self.transfers.key.believes(ticket):
            self.transfers.order(orders.ReleaseTicket(ticket))

    def release_request(self, request_id: RequestId) -> None:
        """Ends the lease that was granted for a request, if it is still held."""
        self._free(self.leases.end_of_request(request_id))

    def end_leases(self) -> None:
        """Ends all leases, whoever may still read."""
        for lease in self.leases.end_all():
            self._free(lease)

    def take_news(self) -> Arrivals:
        """Books what has happened since the last step, and ends leases whose time is up."""
        arrivals = Arrivals()
        for news in self.transfers.news() if self.transfers is not None else ():
            self._take(news, arrivals)
        for lease in self.leases.expired(self.clock()):
            self.counters.leases_expired += 1
            logger.warning(
                "the lease of %s has expired: its readers gave no sign of life", lease.ticket.remote_request_id
            )
            self._free(lease)
        if line := self._figures.take_line():
            logger.info(line)
        return arrivals

    def _take(self, news: orders.News, arrivals: Arrivals) -> None:
        match news:
            case orders.PullLanded():
                self._landed(news, arrivals)
            case orders.PullFailed():
                self._failed(news, arrivals)
            case orders.Met():
                arrivals.met.append(news)
            case orders.PullSettled(number):
                self.pool.release(self._pulls.pop(number).blocks)
            case orders.ReaderDone(lease_id, reader):
                self._free(self.leases.reader_done(lease_id, reader))
            case orders.ReaderWaits(lease_id):
                self.leases.reader_waits(lease_id, self.clock())

    def _landed(self, landed: orders.PullLanded, arrivals: Arrivals) -> None:
        pull = self._pulls.pop(landed.number)
        self.counters.transfers += 1
        self.counters.transfer_bytes += landed.num_bytes
        self.counters.transfer_descriptors += landed.num_descriptors
        self._figures.add(landed)
        if (group := pull.group) is not None and (ticket := group.ticket) is not None:
            group.computed, group.cached_tokens = ticket.num_tokens, ticket.cached_tokens
            group.pull = group.ticket = None
            group.pulled = pull.report(pull.start_ns + int(landed.seconds * 1e9), num_bytes=landed.num_bytes)
            arrivals.landed.append(group)
            logger.info("fetched %s: %d bytes in %.1f ms", _label(group), landed.num_bytes, 1000 * landed.seconds)
        self.pool.release(pull.blocks)

    def _failed(self, failed: orders.PullFailed, arrivals: Arrivals) -> None:
        pull = self._pulls[failed.number]
        self._count_failure(failed.kind)
        if (group := pull.group) is not None:
            logger.warning("the prompt of %s is computed here: %s", _label(group), failed.message)
            pull.group = group.pull = group.ticket = None
            group.pulled = pull.report(time.time_ns(), failure=failed.kind.value)
            arrivals.failed.append(group)
        if failed.settled:
            self.pool.release(self._pulls.pop(failed.number).blocks)

    def _count_failure(self, kind: FailureKind) -> None:
        failures = self.counters.transfer_failures
        failures[kind] = failures.get(kind, 0) + 1

    def _free(self, lease: Lease | None) -> None:
        if lease is not None:
            self.pool.release(lease.ticket.remote_block_ids)
            self._tell_leases()

    def _tell_leases(self) -> None:
        self.check_open().order(orders.LeasesHeld(len(self.leases)))


def check_ticket(ticket: Ticket, prompt: tuple[int, ...], *, block_size: int) -> None:
    """Raises RequestError unless the ticket's KV is that of the beginning of the prompt."""
    if not ticket.is_for(prompt) or len(ticket.remote_block_ids) != blocks_for(ticket.num_tokens, block_size):
        message = "Invalid 'kv_transfer_params': the ticket is not for this prompt."
        raise RequestError(message, param="kv_transfer_params", code="invalid_value")


def _label(group: Group) -> str:
    """The name of a group in log lines."""
    request = group.request
    return f"{request.request_id} ({request.trace})" if request.trace else request.request_id
