"""The ticket: all that a decode worker needs to fetch a trunk. On the wire it is `kv_transfer_params`.

Field names are vLLM's where vLLM has them (its NIXL connector, `do_remote_prefill` and so on), so that gateways which
pass the object on from prefill to decode work unchanged. All numbers stay below 2^53, which every JSON reader keeps.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from ipaddress import ip_address
from typing import Annotated

import msgspec

from motet.errors import RequestError

TICKET_VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
Port = Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class TransferAddress(msgspec.Struct, frozen=True):
    """Where a worker's side channel answers, and which start of the worker it is."""

    engine_id: str
    """New at every start."""
    host: str
    port: int


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trunk that a prefill worker holds ready for `readers` readers."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_request_id: str
    """The group on the prefill worker."""
    remote_host: str
    remote_port: Port
    remote_block_ids: tuple[Count, ...]
    """In order of the positions they hold."""
    tp_size: int = 1

    version: int = TICKET_VERSION
    num_tokens: Positive
    """Prompt tokens whose KV is there: all but the last, which the decode worker runs itself."""
    prompt_digest: str
    """Of those tokens: see `prompt_digest`."""
    generations: tuple[Count, ...]
    """One a block, as they must still be when the data has been read."""
    lease_id: Positive
    lease_slot: Count
    """Where the prefill worker's proof shows the lease while it is held."""
    lease_s: Seconds
    """How long it is held without a sign of life from a reader."""
    readers: Positive = 1
    cached_tokens: Count = 0
    """Of `num_tokens`, those found in the prefill worker's prefix cache."""
    seal: str = ""
    """Of all the rest, with the cluster key (see `cluster_key`); empty without one."""
    foreign: str = ""
    """The ticket of an engine that is not ours, as the JSON that it wrote; only such an engine reads it. Never on the
    wire: it passes from a prefill engine to a decode engine inside one server."""

    @property
    def address(self) -> TransferAddress:
        return TransferAddress(self.remote_engine_id, self.remote_host, self.remote_port)

    @property
    def digest(self) -> int:
        """63 bits that the prefill worker's proof shows: a ticket in which a client, through whose hands it came, has
        changed the prompt, the blocks or anything else that says what they hold, has another one."""
        numbers = (self.lease_id, self.lease_slot, self.num_tokens, self.cached_tokens, len(self.remote_block_ids))
        promise = array("Q", (*numbers, *self.remote_block_ids, *self.generations)).tobytes()
        digest = blake2b(promise + self.prompt_digest.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def is_for(self, prompt: Sequence[int]) -> bool:
        """Whether its KV is said to be that of the beginning of this prompt."""
        return self.num_tokens < len(prompt) and self.prompt_digest == prompt_digest(prompt[: self.num_tokens])


def prompt_digest(tokens: Sequence[int]) -> str:
    """128 bits that name these token ids, so that a ticket is never used for another prompt."""
    return blake2b(array("I", tokens).tobytes(), digest_size=16).hexdigest()


def ticket_of(params: object) -> Ticket:
    """The ticket in one object. Raises RequestError naming the field."""
    if not isinstance(params, Mapping):
        raise _refused("it must be an object")
    version = params.get("version")
    if version != TICKET_VERSION:
        raise _refused(f"its version is {version!r}; this server understands {TICKET_VERSION}")
    try:
        ticket = msgspec.convert(params, Ticket)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from error
    if why := _contradiction(ticket):
        raise _refused(why)
    return ticket


def params_of(ticket: Ticket) -> dict[str, object]:
    """The ticket as JSON-ready `kv_transfer_params`."""
    params: dict[str, object] = msgspec.to_builtins(ticket)
    return params


def _contradiction(ticket: Ticket) -> str | None:
    """What in a ticket cannot be, though each field is of the right type."""
    if ticket.foreign:
        return "foreign is not for the wire"
    if not ticket.do_remote_prefill or ticket.do_remote_decode:
        return "a ticket has do_remote_prefill true and do_remote_decode false"
    if not is_address(ticket.remote_host):
        return f"remote_host is {ticket.remote_host!r}; it must be an address, not a name"
    if ticket.tp_size != 1:
        return f"tp_size is {ticket.tp_size}; this server reads from workers with 1"
    if not ticket.remote_block_ids:
        return "remote_block_ids is empty"
    if len(ticket.remote_block_ids) != len(ticket.generations):
        return "remote_block_ids and generations differ in length"
    if len(set(ticket.remote_block_ids)) != len(ticket.remote_block_ids):
        return "remote_block_ids names a block twice"
    if ticket.cached_tokens > ticket.num_tokens:
        return "cached_tokens is more than num_tokens"
    return None


def is_address(host: str) -> bool:
    """Whether it is an IP address: names would have to be looked up, which may take as long as somebody likes."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _refused(why: str) -> RequestError:
    return RequestError(f"Invalid 'kv_transfer_params': {why}.", param="kv_transfer_params", code="invalid_value")
