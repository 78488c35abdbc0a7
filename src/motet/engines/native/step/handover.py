"""Trunks that are transferred between workers: leases on blocks that this engine prefilled for other workers, and pulls
of blocks that other workers prefilled.

    prefilled group ──► lease ──► acknowledged by all readers, released or expired ──► blocks idle in the prefix cache
    group with a ticket ──► pull ──► landed: the trunk has arrived                 ──► computes the last prompt token
                                └──► failed: the group waits again, no ticket      ──► computes the prompt

Both the group and the pull hold the blocks into which the pull writes. A pull is settled when no transfer can write
into its blocks any more; only then it releases them. A transfer whose peer hangs can last much longer than its group.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from motet.engines.native.kv.pool import BlockPool, blocks_for
from motet.engines.native.step.sequence import Group, TrunkFetch
from motet.errors import RequestError
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.transfer import orders
from motet.transfer.figures import TransferFigures
from motet.transfer.lease import Lease, LeaseTable, new_lease_id
from motet.transfer.orders import FailureKind
from motet.transfer.thread import TransferThread
from motet.transfer.ticket import Ticket, is_for_prompt, prompt_digest
from motet.types import PullReport

logger = logging.getLogger(__name__)

NO_TRANSFERS = "this engine does not transfer KV: only servers started with --role prefill or decode do"


@dataclass
class OpenPull:
    """A transfer in progress, and the blocks that it can still write into."""

    blocks: list[int]
    """Blocks that the pull holds until it has landed or is settled."""
    group: Group | None
    """The group that waits for the pull; None once the group has continued without it."""
    start_ns: int = field(default_factory=time.time_ns)
    """Unix time of the order, for traces."""


@dataclass
class TransferResults:
    """Results of transfers since the last step on which the core must act."""

    landed: list[Group] = field(default_factory=list)
    """Groups whose trunks have arrived."""
    failed: list[Group] = field(default_factory=list)
    """Groups to suspend, because their failed pulls can still write into their blocks."""
    connected: list[orders.ConnectResult] = field(default_factory=list)
    """Results of attempts to connect to workers."""


@dataclass(eq=False, kw_only=True)
class Handover:
    """The leases and pulls of an engine. Owned by the core; the scheduler starts and abandons pulls."""

    transfers: TransferThread | None
    """Thread that transfers KV from and to other workers; None for an engine that does not transfer KV."""
    pool: BlockPool
    counters: EngineStats
    block_size: int
    lease_s: float
    """Seconds for which a lease holds its blocks after the last heartbeat of a reader."""
    clock: Callable[[], float]
    settle: Callable[[], None]
    """See `ModelRunner`."""

    def __post_init__(self) -> None:
        self.leases = LeaseTable(self.pool.proof, seconds=self.lease_s)
        self._figures = TransferFigures(self.clock)
        self._numbers = count()
        self._pulls: dict[int, OpenPull] = {}

    def set_gauges(self, stats: EngineStats) -> None:
        stats.leases = len(self.leases)
        stats.oldest_lease_s = self.leases.oldest_age_s(self.clock())
        stats.pulls_open = len(self._pulls)
        stats.blocks_pulling = sum(len(pull.blocks) for pull in self._pulls.values() if pull.group is None)
        stats.transfer_seconds = tuple(self._figures.counts)
        stats.transfer_seconds_sum = self._figures.seconds_sum

    def tables(self) -> list[Sequence[int]]:
        """Returns the blocks that each lease and each pull holds."""
        return [*self.leases.tables(), *(pull.blocks for pull in self._pulls.values())]

    @property
    def wake_s(self) -> float | None:
        """Time at which `take_results` must be called even without a message, because a lease expires or a log line is
        due. None if neither is expected."""
        return min(
            (at for at in (self.leases.next_expiry_s(), self._figures.log_due_s) if at is not None), default=None
        )

    def require_transfers(self) -> TransferThread:
        """Returns the transfer thread. Raises RequestError for an engine that does not transfer KV."""
        if self.transfers is None:
            raise RequestError(NO_TRANSFERS, param="kv_transfer_params")
        return self.transfers

    def accept_ticket(self, group: Group) -> None:
        """Sends heartbeats for the lease of a new group's ticket until its trunk is fetched. If the ticket cannot be
        used, the group computes its prompt. Raises RequestError if the ticket is for another prompt."""
        ticket = group.request.ticket
        if ticket is None:
            return
        transfers = self.require_transfers()
        own = ticket.remote_engine_id == transfers.address.engine_id
        check_ticket(ticket, group.prompt, block_size=self.block_size)
        if own or group.is_scored:
            # Blocks that this engine prefilled are in its prefix cache; scores need the logits of the prompt.
            self.release(ticket)
            return
        if not transfers.key.accepts(ticket):
            self._count_failure(FailureKind.REFUSED)
            logger.warning("this engine computes the prompt of %s: its ticket lacks the cluster's seal", _label(group))
            return
        if ticket.weights != group.trunk.weights:
            self._count_failure(FailureKind.WEIGHTS)
            logger.warning("this engine computes the prompt of %s: its ticket is for other weights", _label(group))
            self.release(ticket)
            return
        group.fetch = TrunkFetch(ticket)
        transfers.order(orders.KeepAlive(ticket))

    def start_pull(self, group: Group) -> None:
        """If a group that was just admitted has a ticket, starts the pull of the blocks that the prefix cache lacks."""
        fetch = group.fetch
        if fetch is None:
            return
        ticket, blocks, hits = fetch.ticket, group.trunk.blocks, group.trunk.num_published
        missing = range(hits, len(ticket.remote_block_ids))
        self.counters.pull_blocks_avoided += hits
        if not missing:
            self.counters.pulls_avoided += 1
            self.abandon(group)
            return
        pairs = tuple((ticket.remote_block_ids[i], ticket.generations[i], blocks[i]) for i in missing)
        pull = OpenPull([local for _, _, local in pairs], group)
        self.pool.share(pull.blocks)
        fetch.pull = next(self._numbers)
        self._pulls[fetch.pull] = pull
        self.settle()  # a GPU can still be writing for the group that held these blocks before
        self.require_transfers().order(orders.PullOrder(fetch.pull, ticket, pairs, _label(group)))

    def abandon(self, group: Group) -> None:
        """Releases the ticket of a group, or abandons its pull. Called when the group does not use the ticket, and
        before it loses the blocks into which the pull writes."""
        fetch, group.fetch = group.fetch, None
        if fetch is None:
            return
        if fetch.pull is None:
            self.require_transfers().order(orders.ReleaseTicket(fetch.ticket))
        else:
            self._pulls[fetch.pull].group = None
            self.require_transfers().order(orders.AbandonPull(fetch.pull))

    def grant(self, group: Group, blocks: list[int]) -> Ticket:
        """Returns the ticket for a group whose prompt is prefilled. The caller's references to `blocks` pass to a
        lease, which releases them at its end."""
        self.settle()
        transfers = self.require_transfers()
        proof, address, num_tokens = self.pool.proof, transfers.address, group.trunk.num_tokens
        ticket = Ticket(
            remote_engine_id=address.engine_id,
            remote_request_id=group.request.request_id,
            remote_host=address.host,
            remote_port=address.port,
            remote_block_ids=tuple(blocks),
            num_tokens=num_tokens,
            prompt_digest=prompt_digest(group.prompt[:num_tokens]),
            generations=proof.generations(blocks),
            lease_id=new_lease_id(),
            lease_slot=proof.allocate_slot(),
            lease_s=self.leases.seconds,
            readers=group.readers,
            cached_tokens=group.facts.num_cached or 0,
            weights=group.trunk.weights,
        )
        request = group.request
        self.leases.grant(ticket, now_s=self.clock(), client=request.client, client_weight=request.client_weight)
        self._report_leases()
        self.counters.prefills += 1
        logger.info("prefilled %s for %d: %d tokens", _label(group), group.readers, num_tokens)
        return transfers.key.sealed(ticket)

    def release(self, ticket: Ticket) -> None:
        """Ends the lease of a ticket, here or on another worker. Does nothing if this engine does not transfer KV."""
        if self.transfers is None:
            return
        if ticket.remote_engine_id == self.transfers.address.engine_id:
            self._free(self.leases.release(ticket.lease_id))
        elif self.transfers.key.accepts(ticket):
            self.transfers.order(orders.ReleaseTicket(ticket))

    def release_request(self, request_id: RequestId) -> None:
        """Ends the lease that was granted for a request, if it is still held."""
        self._free(self.leases.release_request(request_id))

    def end_leases(self) -> None:
        """Ends all leases, even those with readers that are still reading."""
        for lease in self.leases.release_all():
            self._free(lease)

    def take_results(self) -> TransferResults:
        """Applies the events of the transfer thread since the last step, and ends leases that have expired."""
        results = TransferResults()
        for event in self.transfers.take_events() if self.transfers is not None else ():
            self._apply(event, results)
        for lease in self.leases.expire(self.clock()):
            self.counters.leases_expired += 1
            logger.warning(
                "the lease of %s has expired: its readers sent no heartbeats", lease.ticket.remote_request_id
            )
            self._free(lease)
        if line := self._figures.take_log_line():
            logger.info(line)
        return results

    def _apply(self, event: orders.TransferEvent, results: TransferResults) -> None:
        match event:
            case orders.PullLanded():
                self._pull_landed(event, results)
            case orders.PullFailed():
                self._pull_failed(event, results)
            case orders.ConnectResult():
                results.connected.append(event)
            case orders.PullSettled(number):
                self.pool.release(self._pulls.pop(number).blocks)
            case orders.ReaderDone(lease_id, reader):
                self._free(self.leases.reader_done(lease_id, reader))
            case orders.ReaderHeartbeat(lease_id):
                self.leases.extend(lease_id, self.clock())

    def _pull_landed(self, landed: orders.PullLanded, results: TransferResults) -> None:
        pull = self._pulls.pop(landed.number)
        self.counters.transfers += 1
        self.counters.transfer_bytes += landed.num_bytes
        self.counters.transfer_descriptors += landed.num_descriptors
        self._figures.add(landed)
        if (group := pull.group) is not None and (fetch := group.fetch) is not None:
            group.trunk.num_computed = fetch.ticket.num_tokens
            group.fetch = None
            group.facts.num_cached = fetch.ticket.cached_tokens
            end_ns = pull.start_ns + int(landed.seconds * 1e9)
            group.facts.pull = PullReport(pull.start_ns, end_ns, landed.num_bytes)
            results.landed.append(group)
            logger.info("fetched %s: %d bytes in %.1f ms", _label(group), landed.num_bytes, 1000 * landed.seconds)
        self.pool.release(pull.blocks)

    def _pull_failed(self, failed: orders.PullFailed, results: TransferResults) -> None:
        pull = self._pulls[failed.number]
        self._count_failure(failed.kind)
        if (group := pull.group) is not None:
            logger.warning("this engine computes the prompt of %s: %s", _label(group), failed.message)
            pull.group = group.fetch = None
            group.facts.pull = PullReport(pull.start_ns, time.time_ns(), 0, failed.kind.value)
            results.failed.append(group)
        if failed.settled:
            self.pool.release(self._pulls.pop(failed.number).blocks)

    def _count_failure(self, kind: FailureKind) -> None:
        failures = self.counters.transfer_failures
        failures[kind] = failures.get(kind, 0) + 1

    def _free(self, lease: Lease | None) -> None:
        if lease is not None:
            self.pool.release(lease.ticket.remote_block_ids)
            self._report_leases()

    def _report_leases(self) -> None:
        self.require_transfers().order(orders.LeasesHeld(len(self.leases)))


def check_ticket(ticket: Ticket, prompt: tuple[int, ...], *, block_size: int) -> None:
    """Raises RequestError unless the ticket is for the KV of a prefix of the prompt."""
    if not is_for_prompt(ticket, prompt) or len(ticket.remote_block_ids) != blocks_for(ticket.num_tokens, block_size):
        message = "Invalid 'kv_transfer_params': the ticket is not for this prompt."
        raise RequestError(message, param="kv_transfer_params", code="invalid_value")


def _label(group: Group) -> str:
    """Returns the name of a group for log lines."""
    request = group.request
    return f"{request.request_id} ({request.trace})" if request.trace else request.request_id
