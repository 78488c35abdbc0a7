"""What workers say to each other over the side channel, and how it is written.

    reader                                      owner of the leases
      Hello ──────────────────────────────────►
            ◄────────────────────────────────── Welcome, SomeoneElse or Refused
      Waits, Release, Attend ─────────────────►   (never answered, unless by Refused)

Every message is an `Envelope`: its version can be read by every version, its payload only by the same one and with the
same cluster key. MessagePack throughout; nothing that comes in can name code.
"""

import secrets
from typing import TypeVar

import msgspec

from motet.transfer.cluster_key import NONCE_BYTES, ClusterKey
from motet.transfer.layout import KVFacts, Memory

CHANNEL_VERSION = 1
"""History: 1, the first."""

MAX_QUESTION_BYTES = 64 * 2**10
MAX_ANSWER_BYTES = 16 * 2**20
"""A transport's description names every registered region."""
MAX_REASON_CHARACTERS = 500


class Hello(msgspec.Struct, frozen=True, tag=True):
    """May I read from you?"""

    wanted: str
    """The engine id that should be at this address."""
    facts: KVFacts


class Waits(msgspec.Struct, frozen=True, tag=True):
    """A reader of this lease is alive and has not read yet."""

    lease_id: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """This reader of the lease has its data, or wants it no more. Comes as a notification too, when data was read."""

    lease_id: int
    reader: str


class Attend(msgspec.Struct, frozen=True, tag=True):
    """A read of mine is still open: poll for it."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """What a reader needs for `Transport.connect`."""

    engine_id: str
    description: bytes
    memory: Memory


class SomeoneElse(msgspec.Struct, frozen=True, tag=True):
    """The worker that is wanted is not here; another start of it is."""

    engine_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """You may not read from me; `reason` is told from where it is read: `here` is the reader's side."""

    reason: str


Question = Hello | Waits | Release | Attend
Answer = Welcome | SomeoneElse | Refused


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Never changes its first field; later versions may have more."""

    version: int
    nonce: bytes
    payload: bytes
    seal: bytes


class Unreadable(Exception):
    """Not a message of this protocol."""


Message = TypeVar("Message")
_envelopes = msgspec.msgpack.Decoder(Envelope)
_questions: "msgspec.msgpack.Decoder[Question]" = msgspec.msgpack.Decoder(Question)
_answers: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Answer)
_releases = msgspec.msgpack.Decoder(Release)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def written(message: Question | Answer, key: ClusterKey, nonce: bytes) -> bytes:
    """`nonce`: a new one for a question, the question's for an answer."""
    payload = msgspec.msgpack.encode(message)
    return msgspec.msgpack.encode(Envelope(CHANNEL_VERSION, nonce, payload, key.seal(nonce, payload)))


def opened(body: bytes) -> Envelope:
    """Raises Unreadable."""
    return _decoded(_envelopes, body)


def question_in(envelope: Envelope) -> Question:
    """Raises Unreadable. Look at version and seal first."""
    return _decoded(_questions, envelope.payload)


def answer_in(envelope: Envelope) -> Answer:
    """Raises Unreadable. Look at version and seal first."""
    return _decoded(_answers, envelope.payload)


def notification(message: Release) -> bytes:
    """For `Transport.notify`, whose connection was made after a Welcome and needs no seal."""
    return msgspec.msgpack.encode(message)


def release_in(body: bytes) -> Release:
    """A notification. Raises Unreadable."""
    return _decoded(_releases, body)


def complaint(envelope: Envelope, key: ClusterKey) -> str | None:
    """Why an envelope may not be believed, told to who sent it."""
    if envelope.version != CHANNEL_VERSION:
        return f"the side channel speaks version {envelope.version} here and {CHANNEL_VERSION} there"
    return key.complaint(envelope.nonce, envelope.payload, envelope.seal)


def _decoded(decoder: "msgspec.msgpack.Decoder[Message]", body: bytes) -> Message:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from error
