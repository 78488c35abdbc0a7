"""The ticket: everything that a decode worker needs to fetch a trunk. On the wire it is `kv_transfer_params`.

1. The prefill worker makes the ticket, seals it with the cluster key, and returns it.
2. The router, a gateway or a client passes it on to a decode worker, unchanged.
3. `ticket_of` validates a ticket that comes over HTTP, and `is_for_prompt` compares it with the prompt.
4. The decode worker checks the seal, fetches the trunk, and compares the proof with the ticket's generations and
   digest.

Fields that vLLM's NIXL connector also has (`do_remote_prefill` and so on) have the same names, so that gateways that
pass the object on from prefill to decode work unchanged. All numbers stay below 2^53, because JSON readers that have
only doubles change larger ones.

Workers that have a cluster key exchange messages only with workers that have the same key, and accept only tickets
sealed with it:

    seal of a message = HMAC-SHA256(key, nonce | payload)           empty without a key
    seal of a ticket  = HMAC-SHA256(key, "ticket" | ticket), in hex

The reader generates the nonce, and the reply repeats it, so an old reply is never accepted. The key excludes strangers,
but does not encrypt: a party that records the messages of a lease can repeat them while that lease lasts.
"""

import hashlib
import hmac
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
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


class TransportKind(StrEnum):
    """What moves KV between the processes of two workers (`transport`)."""

    NIXL = "nixl"
    SHARED_MEMORY = "shared-memory"


class TransferAddress(msgspec.Struct, frozen=True):
    """The address of a worker's side channel, and an id of the worker's current start."""

    engine_id: str
    """A new id each time the worker starts."""
    host: str
    port: int


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A trunk that a prefill worker keeps for `readers` readers. Unknown keys are ignored: the routers of clients add
    their own, such as `transfer_id`."""

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
    """Prompt tokens whose KV is in the blocks: all except the last token, which the decode worker runs itself."""
    prompt_digest: str
    """Digest of these tokens: see the function `prompt_digest`."""
    generations: tuple[Count, ...]
    """Generation of each block, which must be the same after the data has been read."""
    lease_id: Positive
    lease_slot: Count
    """Slot of the prefill worker's proof that contains the ticket's digest while the lease is held."""
    lease_s: Seconds
    """Time in seconds for which the lease is held without a heartbeat from a reader."""
    readers: Positive = 1
    cached_tokens: Count = 0
    """Number of the `num_tokens` that the prefill worker found in its prefix cache."""
    weights: str = ""
    """`EngineInfo.block_weights` of the prefill worker. A decode worker with other weights does not use the KV."""
    seal: str = ""
    """Seal of all other fields with the cluster key; empty without a key."""
    foreign: str = ""
    """Ticket of a third-party engine (vLLM), as JSON; only an engine of the same kind reads it. It is never on the
    wire: it passes from a prefill engine to a decode engine inside one server."""

    @property
    def address(self) -> TransferAddress:
        return TransferAddress(self.remote_engine_id, self.remote_host, self.remote_port)

    @property
    def digest(self) -> int:
        """The 63 bits that the prefill worker publishes in its proof. They cover all fields that describe the content
        of the blocks: if a client changes the prompt or the blocks, the digest changes too."""
        numbers = (self.lease_id, self.lease_slot, self.num_tokens, self.cached_tokens, len(self.remote_block_ids))
        content = array("Q", (*numbers, *self.remote_block_ids, *self.generations)).tobytes()
        digest = hashlib.blake2b(content + self.prompt_digest.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def prompt_digest(tokens: Sequence[int]) -> str:
    """Returns a 128-bit digest of token ids, in hex, so that a ticket is never used for another prompt."""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=16).hexdigest()


def is_for_prompt(ticket: Ticket, prompt: Sequence[int]) -> bool:
    """Returns True if the ticket is for the KV of the first tokens of this prompt."""
    return ticket.num_tokens < len(prompt) and ticket.prompt_digest == prompt_digest(prompt[: ticket.num_tokens])


def ticket_of(params: object) -> Ticket:
    """Parses a `kv_transfer_params` object. Raises a RequestError that names the invalid field."""
    if not isinstance(params, Mapping):
        raise _invalid("it must be an object")
    version = params.get("version")
    if version != TICKET_VERSION:
        raise _invalid(f"its version is {version!r}; this server supports version {TICKET_VERSION}")
    try:
        ticket = msgspec.convert(params, Ticket)
        msgspec.msgpack.encode(ticket)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair, which no message can contain
        raise _invalid(f"it contains {error.object[error.start : error.end]!r}, which is not a character") from error
    if problem := _contradiction(ticket):
        raise _invalid(problem)
    return ticket


def params_of(ticket: Ticket) -> dict[str, object]:
    """Returns the ticket as `kv_transfer_params` for JSON."""
    params: dict[str, object] = msgspec.to_builtins(ticket)
    return params


def _contradiction(ticket: Ticket) -> str | None:
    """Returns the error in a ticket whose fields all have valid types; None if there is no error."""
    blocks, host = ticket.remote_block_ids, ticket.remote_host
    contradictions = {
        "foreign must be empty": ticket.foreign,
        "do_remote_prefill must be true and do_remote_decode must be false": not ticket.do_remote_prefill
        or ticket.do_remote_decode,
        f"remote_host is {host!r}; it must be an IP address": not is_address(host),
        f"tp_size is {ticket.tp_size}; this server supports only 1": ticket.tp_size != 1,
        "remote_block_ids is empty": not blocks,
        "remote_block_ids and generations differ in length": len(blocks) != len(ticket.generations),
        "remote_block_ids contains a block twice": len(set(blocks)) != len(blocks),
        "cached_tokens is greater than num_tokens": ticket.cached_tokens > ticket.num_tokens,
    }
    return next((problem for problem, is_present in contradictions.items() if is_present), None)


def _invalid(problem: str) -> RequestError:
    return RequestError(f"Invalid 'kv_transfer_params': {problem}.", param="kv_transfer_params", code="invalid_value")


def is_address(host: str) -> bool:
    """Returns True for an IP address. A host name would need a DNS query, whose duration has no limit."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ClusterKey:
    """Seals tickets and messages, and checks the seals of other workers. An empty key means that there is no key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def seal(self, nonce: bytes, payload: bytes) -> bytes:
        return hmac.digest(self._key, nonce + payload, hashlib.sha256) if self._key else b""

    def sealed(self, ticket: Ticket) -> Ticket:
        return msgspec.structs.replace(ticket, seal=self._seal_of(ticket))

    def accepts(self, ticket: Ticket) -> bool:
        """Returns True if a worker with this key has made the ticket, or if there is no key."""
        # Compared as bytes: `compare_digest` raises for texts that are not ASCII, and the client can have sent one.
        return not self._key or hmac.compare_digest(self._seal_of(ticket).encode(), ticket.seal.encode())

    def _seal_of(self, ticket: Ticket) -> str:
        plain = msgspec.msgpack.encode(msgspec.structs.replace(ticket, seal=""))
        return hmac.digest(self._key, b"ticket" + plain, hashlib.sha256).hex() if self._key else ""

    def seal_error(self, nonce: bytes, payload: bytes, *, seal: bytes) -> str | None:
        """Returns the error in a message's seal, phrased for the sender of the message (`here` is the sender's side);
        None if the message can be trusted."""
        if seal and not self._key:
            return "a cluster key is set here and none there"
        if self._key and not seal:
            return "no cluster key is set here and one is set there"
        # The fixed length of the nonce leaves only one way to split nonce + payload.
        if self._key and len(nonce) != NONCE_BYTES:
            return f"the nonce does not have {NONCE_BYTES} bytes"
        if not hmac.compare_digest(self.seal(nonce, payload), seal):
            return "the cluster keys differ"
        return None
