"""The prefill worker's promises: which blocks are kept for whom, and until when. Pure; the clock comes from outside."""

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from motet.ids import RequestId
from motet.transfer.proof import GENERATION_BITS, Proof


@dataclass
class Lease:
    """Blocks kept until every reader is done or nobody has given a sign of life for `seconds`."""

    lease_id: int
    slot: int
    request_id: RequestId
    blocks: tuple[int, ...]
    readers: int
    granted_s: float
    ends_s: float
    shown: int
    """In the proof: its id, until there is a ticket whose digest can be shown."""
    done: set[str] = field(default_factory=set)


class LeaseTable:
    """Leases by id. Who calls `done`, `end` or `expired` releases the blocks it gets back."""

    def __init__(self, proof: Proof, *, seconds: float) -> None:
        self.seconds = seconds
        self._proof = proof
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        """In the order in which they end: all last equally long from their last sign of life."""
        self._of_request: dict[RequestId, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, request_id: RequestId, blocks: Sequence[int], *, readers: int, now_s: float) -> Lease:
        """The blocks' holder is now the lease."""
        lease_id = secrets.randbits(GENERATION_BITS - 1) + 1
        slot = self._proof.show(lease_id)
        lease = Lease(lease_id, slot, request_id, tuple(blocks), readers, now_s, now_s + self.seconds, lease_id)
        self._leases[lease_id] = lease
        self._of_request[request_id] = lease_id
        return lease

    def bind(self, lease: Lease, digest: int) -> None:
        """From now on the proof says which ticket the lease stands behind, and not only that it is held."""
        self._proof.reshow(lease.slot, digest)
        lease.shown = digest

    def reader_done(self, lease_id: int, reader: str) -> Lease | None:
        """The lease if that was its last reader. A reader that says so twice, or too late, changes nothing."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        lease.done.add(reader)
        return self._remove(lease) if len(lease.done) >= lease.readers else None

    def reader_waits(self, lease_id: int, now_s: float) -> None:
        if lease := self._leases.get(lease_id):
            lease.ends_s = now_s + self.seconds
            self._leases.move_to_end(lease_id)

    def end(self, lease_id: int) -> Lease | None:
        """Ends a lease at once, whoever still reads."""
        lease = self._leases.get(lease_id)
        return None if lease is None else self._remove(lease)

    def end_of_request(self, request_id: RequestId) -> Lease | None:
        lease_id = self._of_request.get(request_id)
        return None if lease_id is None else self.end(lease_id)

    def expired(self, now_s: float) -> list[Lease]:
        """Takes out the leases whose time is up."""
        expired = []
        while (lease := self._first()) is not None and lease.ends_s <= now_s:
            expired.append(self._remove(lease))
        return expired

    def next_end_s(self) -> float | None:
        """When `expired` may find something next."""
        first = self._first()
        return None if first is None else first.ends_s

    def oldest_s(self, now_s: float) -> float | None:
        """Age of the oldest lease."""
        return max((now_s - lease.granted_s for lease in self._leases.values()), default=None)

    def tables(self) -> Iterable[tuple[int, ...]]:
        """Blocks of every lease, for the books."""
        return [lease.blocks for lease in self._leases.values()]

    def check(self) -> None:
        """Raises AssertionError unless these books and the proof say the same."""
        self._proof.check({lease.slot: lease.shown for lease in self._leases.values()})
        if any(
            lease.lease_id != lease_id or len(lease.done) >= lease.readers for lease_id, lease in self._leases.items()
        ):
            raise AssertionError("a lease that is over is still held")
        ends = [lease.ends_s for lease in self._leases.values()]
        if ends != sorted(ends):
            raise AssertionError("leases do not stand in the order in which they end")
        if any(self._leases[lease_id].request_id != request_id for request_id, lease_id in self._of_request.items()):
            raise AssertionError("a request is said to hold the lease of another")

    def _first(self) -> Lease | None:
        """The one that ends first."""
        return next(iter(self._leases.values()), None)

    def _remove(self, lease: Lease) -> Lease:
        del self._leases[lease.lease_id]
        if self._of_request.get(lease.request_id) == lease.lease_id:
            del self._of_request[lease.request_id]
        self._proof.hide(lease.slot)
        return lease
