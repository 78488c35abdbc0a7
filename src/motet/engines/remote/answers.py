"""What a prefill server answered, in our words: its ticket, its figures, its errors."""

import httpx
import msgspec

from motet.engines.refusal import Refusal
from motet.engines.remote.refusal import refused
from motet.engines.wire import UNREADABLE
from motet.errors import EngineError, MotetError, RequestError
from motet.transfer.ticket import Ticket, TransferAddress, ticket_of
from motet.types import EngineStats, Role


class _Prefilled(msgspec.Struct):
    kv_transfer_params: object = None


class RemoteWorker(msgspec.Struct, kw_only=True):
    """What is of use here of a worker in `/status`."""

    role: Role
    state: str = "ready"
    groups_running: int = 0
    choices_running: int = 0
    choices_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    leases: int = 0
    oldest_lease_s: float | None = None
    transfer: TransferAddress | None = None


class RemoteTotals(msgspec.Struct, kw_only=True):
    prefills: int = 0
    prefill_tokens: int = 0


class RemoteStatus(msgspec.Struct, kw_only=True):
    """The body of `GET /status`."""

    workers: list[RemoteWorker]
    totals: RemoteTotals = msgspec.field(default_factory=RemoteTotals)

    @property
    def dead(self) -> bool:
        """Whether the server still answers, and none of its workers does."""
        return all(worker.state == "dead" for worker in self.workers)

    @property
    def transfer(self) -> TransferAddress | None:
        """Where the KV of its prefill worker can be fetched."""
        addresses = (worker.transfer for worker in self.workers if worker.role is Role.PREFILL)
        return next((address for address in addresses if address is not None), None)

    def stats(self) -> EngineStats:
        workers = self.workers
        return EngineStats(
            groups_running=sum(worker.groups_running for worker in workers),
            choices_running=sum(worker.choices_running for worker in workers),
            choices_waiting=sum(worker.choices_waiting for worker in workers),
            blocks_total=sum(worker.blocks_total for worker in workers),
            blocks_used=sum(worker.blocks_used for worker in workers),
            blocks_cached=sum(worker.blocks_cached for worker in workers),
            leases=sum(worker.leases for worker in workers),
            oldest_lease_s=max((w.oldest_lease_s for w in workers if w.oldest_lease_s is not None), default=None),
            prefills=self.totals.prefills,
            prefill_tokens=self.totals.prefill_tokens,
        )


def ticket_in(response: httpx.Response, server: str) -> Ticket:
    """Raises EngineError."""
    try:
        params = msgspec.json.decode(response.content, type=_Prefilled).kv_transfer_params
    except UNREADABLE as error:
        raise EngineError(f"{server} answered what is no answer to a prefill: {error}") from error
    if params is None:
        raise EngineError(f"{server} sent no ticket; is it running with --role prefill?")
    try:
        return ticket_of(params)
    except RequestError as error:
        raise EngineError(f"{server} sent a ticket this server cannot use: {error.message}") from error


def status_in(response: httpx.Response, server: str) -> RemoteStatus:
    """Raises EngineError."""
    try:
        return msgspec.json.decode(response.content, type=RemoteStatus)
    except UNREADABLE as error:
        raise EngineError(f"{server} answered GET /status with what is no status: {error}") from error


def failure_in(response: httpx.Response, server: str) -> MotetError:
    """Of a response that is not 200."""
    retry_after = response.headers.get("retry-after", "")
    refusal = Refusal(response.status_code, response.reason_phrase, response.content, retry_after)
    return refused(refusal, server, key_hint="Set --prefill-api-key to a key it knows.")
