"""The side channel: the messages between workers over ZeroMQ, and the sockets at both ends.

    reader: SideChannelClient                          owner of the leases: SideChannelListener

1     Hello ─────────────────────────────────────────►
2           ◄───────────────────────────────────────── Welcome, WrongStart or Refused
3     PollRequest, ReaderHeartbeat, ReaderDone ──────►   answered only if refused

Every message is an `Envelope`. Every version of the protocol can read the version number in it; only the same version
with the same cluster key accepts the payload. Everything is MessagePack, so no message can name code. Any process that
reaches the listener's port can send anything: bytes that are not an envelope are dropped without a reply, and a message
with another version or without a valid seal has no effect but a reply with the reason.
"""

import contextlib
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq

from motet.errors import ConfigError, PortTakenError
from motet.transfer.orders import FailureKind, ReaderDone, ReaderHeartbeat, TransferError, TransferEvent
from motet.transfer.ticket import NONCE_BYTES, ClusterKey, TransferAddress
from motet.transfer.transport import KVFacts, RegisteredMemory

logger = logging.getLogger(__name__)

CHANNEL_VERSION = 2
"""Version of the protocol. It is incremented when the layout of any message changes. History: 1, the first version; 2,
`KVFacts.transport`."""

MAX_REQUEST_BYTES = 64 * 2**10
MAX_REPLY_BYTES = 16 * 2**20
"""Maximum size of a reply. It is large because a transport's description lists every registered region."""
MAX_REASON_CHARACTERS = 500

REQUESTS_PER_ROUND = 256
"""Maximum number of messages that a listener reads in one round, so that a flood does not starve the transfers."""
REPLIES_QUEUED = 64
"""Maximum number of replies queued for a reader that does not take them. More are dropped."""
REQUESTS_QUEUED = 64
"""Maximum number of requests queued for a worker that does not answer. More are dropped."""
REPLIES_PER_ROUND = 64
"""Maximum number of replies that a client reads in one round, whatever a worker sends."""
LINGER_MS = 200
"""Time in milliseconds for sending the last messages after `close`."""
RECONNECT_MS = 100
MAX_RECONNECT_MS = 10_000

HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
"""Host names and addresses, without characters that have a meaning in ZeroMQ endpoints."""


class Hello(msgspec.Struct, frozen=True, tag="Hello"):
    """Requests permission to read from this worker."""

    engine_id: str = msgspec.field(name="wanted")
    """Engine id that the reader expects at this address."""
    facts: KVFacts


class PollRequest(msgspec.Struct, frozen=True, tag="Attend"):
    """Requests that the owner polls its transport, because a read of the sender is still open."""


class Welcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """Permits the reader to read, and contains what it needs for `Transport.connect`."""

    engine_id: str
    description: bytes
    memory: RegisteredMemory


class WrongStart(msgspec.Struct, frozen=True, tag="SomeoneElse"):
    """The worker has restarted: it does not have the engine id that the reader expects."""

    engine_id: str


class Refused(msgspec.Struct, frozen=True, tag="Refused"):
    """The reader may not read from this worker. In `reason`, `here` is the reader and `there` the worker."""

    reason: str


ChannelRequest = Hello | ReaderHeartbeat | ReaderDone | PollRequest
ChannelReply = Welcome | WrongStart | Refused


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The outer part of a message. Its first field never changes; later versions can have more fields."""

    version: int
    nonce: bytes
    """Random bytes, new for each request. A reply repeats the nonce of its request."""
    payload: bytes
    seal: bytes


class MalformedMessageError(Exception):
    """The bytes are not a message of this protocol."""


ENVELOPES = msgspec.msgpack.Decoder(Envelope)
REQUESTS: "msgspec.msgpack.Decoder[ChannelRequest]" = msgspec.msgpack.Decoder(ChannelRequest)
REPLIES: "msgspec.msgpack.Decoder[ChannelReply]" = msgspec.msgpack.Decoder(ChannelReply)
NOTIFICATIONS = msgspec.msgpack.Decoder(ReaderDone)
"""Decoder of messages sent with `Transport.notify`. They need no envelope: a Welcome came before their connection."""

Decoded = TypeVar("Decoded")


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def encode(message: ChannelRequest | ChannelReply, key: ClusterKey, *, nonce: bytes) -> bytes:
    """Encodes a message in an envelope, sealed with the key if there is one."""
    payload = msgspec.msgpack.encode(message)
    return msgspec.msgpack.encode(Envelope(CHANNEL_VERSION, nonce, payload, key.seal(nonce, payload)))


def read(decoder: "msgspec.msgpack.Decoder[Decoded]", body: bytes) -> Decoded:
    """Returns the message; raises MalformedMessageError. Check an envelope before reading its payload."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessageError(str(error)) from error


@dataclass(eq=False)
class SideChannelListener:
    """The listening end of the side channel. Owns its socket."""

    socket: "zmq.Socket[bytes]"
    key: ClusterKey
    facts: KVFacts
    welcome: Welcome
    """Reply to readers that may connect. Its description changes when memory is registered again."""

    def receive(self, publish: Callable[[TransferEvent], None]) -> bool:
        """Reads the messages that have arrived. Answers them, publishes them as events or, if it cannot decode them,
        drops them. Never blocks. Returns True if a message came from a reader with the right cluster key."""
        has_reader = False
        for _ in range(REQUESTS_PER_ROUND):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) != 2:
                continue
            reader, body = parts
            try:
                envelope = read(ENVELOPES, body)
                reply: ChannelReply | None = self._refusal_of(envelope)
                if reply is None:
                    request = read(REQUESTS, envelope.payload)
                    has_reader = True
                    if isinstance(request, Hello):
                        reply = self._reply_to(request)
                    elif not isinstance(request, PollRequest):
                        publish(request)
                if reply is not None:
                    self.socket.send_multipart([reader, encode(reply, self.key, nonce=envelope.nonce)], zmq.NOBLOCK)
            except (MalformedMessageError, zmq.ZMQError):  # a reader that is gone or takes no replies gets none
                pass
            except Exception:  # one message must not end the transfers of other workers
                logger.exception("dropped a message of %d bytes that cannot be handled", len(body))
        return has_reader

    def close(self) -> None:
        self.socket.close(linger=0)

    def _refusal_of(self, envelope: Envelope) -> Refused | None:
        """Returns a refusal for another version or an invalid seal; None if the payload can be read and trusted."""
        if envelope.version != CHANNEL_VERSION:
            return Refused(version_mismatch(here=envelope.version, there=CHANNEL_VERSION))
        seal_error = self.key.seal_error(envelope.nonce, envelope.payload, seal=envelope.seal)
        return None if seal_error is None else Refused(seal_error)

    def _reply_to(self, hello: Hello) -> Welcome | WrongStart | Refused:
        if differences := hello.facts.differences(self.facts):
            return Refused("; ".join(differences))
        if hello.engine_id != self.welcome.engine_id:
            return WrongStart(self.welcome.engine_id)
        return self.welcome


def version_mismatch(*, here: int, there: int) -> str:
    """Returns the error message for two workers with different versions; `here` is the reader."""
    return f"the side channel has version {here} here and version {there} there"


def listen(host: str, port: int, *, context: "zmq.Context[zmq.Socket[bytes]]") -> tuple["zmq.Socket[bytes]", str, int]:
    """Returns a bound socket, and the address and port for tickets. Raises a ConfigError that names the flag."""
    address = _bindable(host)
    if not 0 <= port <= 65535:
        raise ConfigError(f"--side-channel-port is {port}; it must be a number from 0 (any free port) to 65535")
    listening = context.socket(zmq.ROUTER)
    listening.setsockopt(zmq.IPV6, address.version == 6)
    listening.setsockopt(zmq.LINGER, 0)
    listening.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    listening.setsockopt(zmq.SNDHWM, REPLIES_QUEUED)
    try:
        listening.bind(endpoint(str(address), port))
    except zmq.ZMQError as error:
        listening.close(linger=0)
        if error.errno == zmq.EADDRNOTAVAIL:
            raise ConfigError(f"--side-channel-host {host}: no interface of this machine has that address") from error
        kind = PortTakenError if error.errno == zmq.EADDRINUSE else ConfigError
        raise kind(f"--side-channel-port {port}: {error.strerror}; set another port, or 0 for any free port") from error
    bound = listening.getsockopt_string(zmq.LAST_ENDPOINT)
    return listening, str(address), int(bound.rpartition(":")[2])


def endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _bindable(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host or " ", None, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(found[0][4][0])
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"--side-channel-host {host!r} is not an address of this machine") from error
    if address.is_unspecified:
        raise ConfigError(
            f"--side-channel-host {host} means every interface, but tickets must contain one address: "
            "set the address at which other workers reach this machine"
        )
    return address


class SideChannelClient:
    """The reader's end of the side channel: a connection to one other worker, which can be slow, gone, or another
    program. Owns its socket, and registers it with the poller. ZeroMQ reconnects by itself, at increasing intervals."""

    def __init__(
        self,
        address: TransferAddress,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        poller: zmq.Poller,
        key: ClusterKey,
    ) -> None:
        """Raises TransferError if the address is invalid."""
        self._poller, self._key = poller, key
        invalid_address = f"{address.host!r} port {address.port} is not an address of a worker"
        if not HOST.fullmatch(address.host):
            raise TransferError(invalid_address, FailureKind.UNREACHABLE)
        try:
            self._socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise TransferError(f"no socket can be opened: {error}", FailureKind.UNREACHABLE) from error
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, REQUESTS_QUEUED)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        try:
            self._socket.connect(endpoint(address.host, address.port))
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise TransferError(invalid_address, FailureKind.UNREACHABLE) from error
        self._poller.register(self._socket, zmq.POLLIN)

    def send(self, request: ChannelRequest, nonce: bytes) -> None:
        """Queues a message. Never blocks."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(request, self._key, nonce=nonce), zmq.NOBLOCK)

    def replies(self) -> list[tuple[bytes, ChannelReply]]:
        """Returns the replies that have arrived, with their requests' nonces. An untrusted reply becomes a Refused."""
        replies = []
        with contextlib.suppress(zmq.Again):
            for _ in range(REPLIES_PER_ROUND):
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
                with contextlib.suppress(MalformedMessageError):
                    envelope = read(ENVELOPES, parts[-1])
                    replies.append((envelope.nonce, self._reply_in(envelope)))
        return replies

    def close(self) -> None:
        self._poller.unregister(self._socket)
        self._socket.close()

    def _reply_in(self, envelope: Envelope) -> ChannelReply:
        """Returns the reply, or a Refused if it cannot be trusted. A refusal needs no valid seal."""
        if envelope.version != CHANNEL_VERSION:
            return Refused(version_mismatch(here=CHANNEL_VERSION, there=envelope.version))
        reply = read(REPLIES, envelope.payload)
        if isinstance(reply, Refused):
            return Refused(reply.reason[:MAX_REASON_CHARACTERS])
        if self._key.seal_error(envelope.nonce, envelope.payload, seal=envelope.seal):
            return Refused("its reply is not sealed with the cluster key that is set here")
        return reply
