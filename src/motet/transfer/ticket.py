"""The ticket: all that a decode worker needs to fetch a trunk. On the wire it is `kv_transfer_params`.

Field names are vLLM's where vLLM has them (its NIXL connector, `do_remote_prefill` and so on), so that gateways which
pass the object on from prefill to decode work unchanged. All numbers stay below 2^53, which every JSON reader keeps.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec

from motet.errors import RequestError

TICKET_VERSION = 1


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
    remote_port: int
    remote_block_ids: tuple[int, ...]
    """In order of the positions they hold."""
    tp_size: int = 1

    version: int = TICKET_VERSION
    num_tokens: int
    """Prompt tokens whose KV is there: all but the last, which the decode worker runs itself."""
    prompt_digest: str
    """Of those tokens: see `prompt_digest`."""
    generations: tuple[int, ...]
    """One a block, as they must still be when the data has been read."""
    lease_id: int
    lease_slot: int
    """Where the prefill worker's proof shows the lease while it is held."""
    lease_s: float
    """How long it is held without a sign of life from a reader."""
    readers: int = 1
    cached_tokens: int = 0
    """Of `num_tokens`, those found in the prefill worker's prefix cache."""

    @property
    def address(self) -> TransferAddress:
        return TransferAddress(self.remote_engine_id, self.remote_host, self.remote_port)


def prompt_digest(tokens: Sequence[int]) -> str:
    """128 bits that name these token ids, so that a ticket is never used for another prompt."""
    return blake2b(array("I", tokens).tobytes(), digest_size=16).hexdigest()


def ticket_of(params: object) -> Ticket:
    """The ticket in a request's `kv_transfer_params`: one object, or a list of one (vLLM's list form for one choice).

    Raises RequestError naming the field."""
    match params:
        case [only]:
            params = only
        case list():
            raise _refused(f"a list of {len(params)} objects; this server takes one object for a whole group")
    if not isinstance(params, Mapping):
        raise _refused("it must be an object")
    version = params.get("version")
    if version != TICKET_VERSION:
        raise _refused(f"its version is {version!r}; this server understands {TICKET_VERSION}")
    try:
        ticket = msgspec.convert(params, Ticket)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from error
    if len(ticket.remote_block_ids) != len(ticket.generations):
        raise _refused("remote_block_ids and generations differ in length")
    return ticket


def params_of(ticket: Ticket) -> dict[str, object]:
    """The ticket as JSON-ready `kv_transfer_params`."""
    params: dict[str, object] = msgspec.to_builtins(ticket)
    return params


def _refused(why: str) -> RequestError:
    return RequestError(f"Invalid 'kv_transfer_params': {why}.", param="kv_transfer_params", code="invalid_value")
