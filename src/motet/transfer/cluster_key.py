"""The cluster key: workers that have one talk only to workers that have the same, and take no ticket of others.

    seal of a message = HMAC-SHA256(key, nonce | payload)           empty without a key
    seal of a ticket  = HMAC-SHA256(key, "ticket" | ticket), in hex

The nonce is drawn by who asks and comes back in the answer, so that an answer is never an old one. It keeps strangers
out; it hides nothing, and who can record the messages of a lease can repeat them while that lease lasts.
"""

import hashlib
import hmac

import msgspec

from motet.transfer.ticket import Ticket

NONCE_BYTES = 16


class ClusterKey:
    """Seals and checks messages; the empty key stands for none."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def seal(self, nonce: bytes, payload: bytes) -> bytes:
        return hmac.digest(self._key, nonce + payload, hashlib.sha256) if self._key else b""

    def sealed(self, ticket: Ticket) -> Ticket:
        return msgspec.structs.replace(ticket, seal=self._seal_of(ticket))

    def believes(self, ticket: Ticket) -> bool:
        """Whether a ticket, which came through a client's hands, is as a worker with this key made it. Without a key
        every ticket is believed."""
        return not self._key or hmac.compare_digest(self._seal_of(ticket), ticket.seal)

    def _seal_of(self, ticket: Ticket) -> str:
        plain = msgspec.msgpack.encode(msgspec.structs.replace(ticket, seal=""))
        return hmac.digest(self._key, b"ticket" + plain, hashlib.sha256).hex() if self._key else ""

    def complaint(self, nonce: bytes, payload: bytes, seal: bytes) -> str | None:
        """What is wrong with a message from elsewhere, told to who sent it; None if it may be believed."""
        if seal and not self._key:
            return "a cluster key is set here and none there"
        if self._key and not seal:
            return "no cluster key is set here and one is set there"
        # A nonce of a fixed length leaves one way only to cut nonce + payload.
        if self._key and len(nonce) != NONCE_BYTES:
            return "the nonce is not of this protocol"
        if not hmac.compare_digest(self.seal(nonce, payload), seal):
            return "the cluster keys differ"
        return None
