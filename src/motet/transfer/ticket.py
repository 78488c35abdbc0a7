"""The ticket: all that a decode worker needs to fetch a trunk. On the wire it is `kv_transfer_params`.

Field names are vLLM's where vLLM has them (its NIXL connector, `do_remote_prefill` and so on), so that gateways which
pass the object on from prefill to decode work unchanged. All numbers stay below 2^53, which every JSON reader keeps.

Workers that have a cluster key talk only to workers that have the same one, and take no ticket of others:

    seal of a message = HMAC-SHA256(key, nonce | payload)           empty without a key
    seal of a ticket  = HMAC-SHA256(key, "ticket" | ticket), in hex

The reader draws the nonce and the answer repeats it, so that an answer is never an old one. The key keeps strangers
out. It does not encrypt, and anyone who records the messages of a lease can repeat them while that lease lasts.
"""

import hashlib
import hmac
from array import array
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Annotated

import msgspec

from motet.errors import RequestError

TICKET_VERSION = 2
NONCE_BYTES = 16

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
Port = Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class TransferAddress(msgspec.Struct, frozen=True):
    """The address of a worker's side channel, and the start of the worker that has it."""

    engine_id: str
    """New for every start of a worker."""
    host: str
    port: int


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trunk that a prefill worker keeps for `readers` readers."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_request_id: str
    """The group's id on the prefill worker."""
    remote_host: str
    remote_port: Port
    remote_block_ids: tuple[Count, ...]
    """Blocks in the order of their positions in the prompt."""
    tp_size: int = 1

    version: int = TICKET_VERSION
    num_tokens: Positive
    """Number of prompt tokens whose KV is there: all except the last, which the decode worker runs itself."""
    prompt_digest: str
    """Digest of those tokens: see `prompt_digest`."""
    generations: tuple[Count, ...]
    """The generation of each block, which must still be the same after the data has been read."""
    lease_id: Positive
    lease_slot: Count
    """The slot of the prefill worker's proof that shows the lease while it is held."""
    lease_s: Seconds
    """Seconds for which the lease is held without a sign of life from a reader."""
    readers: Positive = 1
    cached_tokens: Count = 0
    """Number of `num_tokens` that the prefill worker found in its prefix cache."""
    weights: str = ""
    """`EngineInfo.block_weights` of the prefill worker: under other weights its KV is not used."""
    seal: str = ""
    """Seal of all other fields with the cluster key; empty without a key."""
    foreign: str = ""
    """The ticket of an engine that is not ours, as that engine's JSON; only such an engine reads it. It is never on the
    wire: it passes from a prefill engine to a decode engine inside one server."""

    @property
    def address(self) -> TransferAddress:
        return TransferAddress(self.remote_engine_id, self.remote_host, self.remote_port)

    @property
    def digest(self) -> int:
        """The 63 bits that the prefill worker's proof shows. If a client changes the prompt, the blocks or anything
        else about their content, the digest changes too."""
        numbers = (self.lease_id, self.lease_slot, self.num_tokens, self.cached_tokens, len(self.remote_block_ids))
        promise = array("Q", (*numbers, *self.remote_block_ids, *self.generations)).tobytes()
        digest = hashlib.blake2b(promise + self.prompt_digest.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def is_for(self, prompt: Sequence[int]) -> bool:
        """Returns True if the ticket is for the KV of the beginning of this prompt."""
        return self.num_tokens < len(prompt) and self.prompt_digest == prompt_digest(prompt[: self.num_tokens])


def prompt_digest(tokens: Sequence[int]) -> str:
    """Returns 128 bits that name these token ids, so that a ticket is never used for another prompt."""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=16).hexdigest()


def ticket_of(params: object) -> Ticket:
    """Reads the ticket in a `kv_transfer_params` object. Raises RequestError naming the field."""
    if not isinstance(params, Mapping):
        raise _refused("it must be an object")
    version = params.get("version")
    if version != TICKET_VERSION:
        raise _refused(f"its version is {version!r}; this server understands {TICKET_VERSION}")
    try:
        ticket = msgspec.convert(params, Ticket)
        msgspec.msgpack.encode(ticket)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from error
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair, which no message can contain
        raise _refused(f"it holds {error.object[error.start : error.end]!r}, which is not a character") from error
    if why := _contradiction(ticket):
        raise _refused(why)
    return ticket


def params_of(ticket: Ticket) -> dict[str, object]:
    """Returns the ticket as JSON-ready `kv_transfer_params`."""
    params: dict[str, object] = msgspec.to_builtins(ticket)
    return params


def _contradiction(ticket: Ticket) -> str | None:
    """Returns what is wrong with a ticket whose fields all have the right types; None if nothing is."""
    blocks, host = ticket.remote_block_ids, ticket.remote_host
    contradictions = {
        "foreign is not for the wire": ticket.foreign,
        "a ticket has do_remote_prefill true and do_remote_decode false": not ticket.do_remote_prefill
        or ticket.do_remote_decode,
        f"remote_host is {host!r}; it must be an address, not a name": not is_address(host),
        f"tp_size is {ticket.tp_size}; this server reads from workers with 1": ticket.tp_size != 1,
        "remote_block_ids is empty": not blocks,
        "remote_block_ids and generations differ in length": len(blocks) != len(ticket.generations),
        "remote_block_ids names a block twice": len(set(blocks)) != len(blocks),
        "cached_tokens is more than num_tokens": ticket.cached_tokens > ticket.num_tokens,
    }
    return next((what for what, is_so in contradictions.items() if is_so), None)


def _refused(why: str) -> RequestError:
    return RequestError(f"Invalid 'kv_transfer_params': {why}.", param="kv_transfer_params", code="invalid_value")


def is_address(host: str) -> bool:
    """Returns True for an IP address. A name would have to be looked up, which can take any time."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach that address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ClusterKey:
    """Seals tickets and messages, and checks the seals of others; the empty key means that there is none."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def seal(self, nonce: bytes, payload: bytes) -> bytes:
        return hmac.digest(self._key, nonce + payload, hashlib.sha256) if self._key else b""

    def sealed(self, ticket: Ticket) -> Ticket:
        return msgspec.structs.replace(ticket, seal=self._seal_of(ticket))

    def believes(self, ticket: Ticket) -> bool:
        """Returns True if a worker with this key has made the ticket, which clients pass on, or if there is no key."""
        # As bytes: `compare_digest` raises for texts that are not ASCII, which a client may have sent.
        return not self._key or hmac.compare_digest(self._seal_of(ticket).encode(), ticket.seal.encode())

    def _seal_of(self, ticket: Ticket) -> str:
        plain = msgspec.msgpack.encode(msgspec.structs.replace(ticket, seal=""))
        return hmac.digest(self._key, b"ticket" + plain, hashlib.sha256).hex() if self._key else ""

    def complaint(self, nonce: bytes, payload: bytes, *, seal: bytes) -> str | None:
        """Returns what is wrong with a message's seal, in words for its sender; None if the message can be trusted."""
        if seal and not self._key:
            return "a cluster key is set here and none there"
        if self._key and not seal:
            return "no cluster key is set here and one is set there"
        # If the nonce has a fixed length, nonce + payload cannot be cut in another way.
        if self._key and len(nonce) != NONCE_BYTES:
            return "the nonce is not of this protocol"
        if not hmac.compare_digest(self.seal(nonce, payload), seal):
            return "the cluster keys differ"
        return None
