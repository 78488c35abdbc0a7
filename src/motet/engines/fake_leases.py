"""The book of leases that the fake workers of a cell share."""

from collections import Counter
from itertools import count

from motet.transfer.ticket import Ticket, TransferAddress, prompt_digest
from motet.types import GenerateRequest

LEASE_S = 60.0


class FakeLeases:
    """The trunks that the workers of a fake cell keep for each other."""

    def __init__(self) -> None:
        self.held: dict[int, Ticket] = {}
        self._read: Counter[int] = Counter()
        """Readers that are done, by lease."""
        self._ids = count(1)

    def grant(self, request: GenerateRequest, address: TransferAddress, *, readers: int, block_size: int) -> Ticket:
        """One block id a block of the prompt without its last token."""
        tokens = request.prompt[:-1]
        blocks = tuple(range(-(-len(tokens) // block_size)))
        lease_id = next(self._ids)
        self.held[lease_id] = Ticket(
            remote_engine_id=address.engine_id,
            remote_request_id=request.request_id,
            remote_host=address.host,
            remote_port=address.port,
            remote_block_ids=blocks,
            num_tokens=len(tokens),
            prompt_digest=prompt_digest(tokens),
            generations=(0,) * len(blocks),
            lease_id=lease_id,
            lease_slot=lease_id,
            lease_s=LEASE_S,
            readers=readers,
        )
        return self.held[lease_id]

    def read(self, ticket: Ticket) -> None:
        """One of its readers is done with it; after the last one it is over."""
        self._read[ticket.lease_id] += 1
        if self._read[ticket.lease_id] >= ticket.readers:
            self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        self.held.pop(ticket.lease_id, None)

    def lose(self, engine_id: str) -> None:
        """That engine died, and its memory with it."""
        self.held = {id: ticket for id, ticket in self.held.items() if ticket.remote_engine_id != engine_id}

    def count(self, engine_id: str) -> int:
        return sum(ticket.remote_engine_id == engine_id for ticket in self.held.values())
