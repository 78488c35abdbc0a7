"""The side channel: the messages between workers over ZeroMQ, and the sockets at both ends.

    reader: Dealer                              owner of the leases: SideChannelListener
      Hello ──────────────────────────────────►
            ◄────────────────────────────────── Welcome, WrongStart or Refused
      ReaderWaits, ReaderDone, Attend ────────►   (never answered, unless by Refused)

Every message is an `Envelope`: every version of the protocol can read its version number, but only the same version
with the same cluster key can read its payload. All is MessagePack, so no message can name code. Anybody can send
anything to the listener's port. Bytes that are no message of ours are dropped without an answer; a message without the
right cluster key gets the reason as answer, and nothing else.
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
from motet.transfer.orders import FailureKind, News, ReaderDone, ReaderWaits, TransferError
from motet.transfer.ticket import NONCE_BYTES, ClusterKey, TransferAddress
from motet.transfer.transport import KVFacts, RegisteredMemory

logger = logging.getLogger(__name__)

CHANNEL_VERSION = 1
"""Changes with the layout of any message. History: 1, the first."""

MAX_REQUEST_BYTES = 64 * 2**10
MAX_REPLY_BYTES = 16 * 2**20
"""Most bytes of a reply: a transport's description names every registered region."""
MAX_REASON_CHARACTERS = 500

REQUESTS_PER_ROUND = 256
"""Messages that a listener takes in one round, so that a flood does not starve the transfers."""
REPLIES_QUEUED = 64
"""Replies queued for one reader that does not take them; more are dropped."""
REQUESTS_QUEUED = 64
"""Requests queued for a worker that does not answer; more are dropped."""
REPLIES_PER_ROUND = 64
"""Replies that a dealer takes in one round, whatever a worker sends."""
LINGER_MS = 200
"""Milliseconds that the last messages have to go out after `close`."""
RECONNECT_MS = 100
MAX_RECONNECT_MS = 10_000

HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
"""Names and addresses, without characters that have a meaning for ZeroMQ."""


class Hello(msgspec.Struct, frozen=True, tag="Hello"):
    """The reader asks if it may read from this worker."""

    wanted: str
    """The engine id that should be at this address."""
    facts: KVFacts


class PollRequest(msgspec.Struct, frozen=True, tag="Attend"):
    """A read of the sender's is still open: its target must poll."""


class Welcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """What a reader needs for `Transport.connect`."""

    engine_id: str
    description: bytes
    memory: RegisteredMemory


class WrongStart(msgspec.Struct, frozen=True, tag="SomeoneElse"):
    """The requested start of the worker is gone; another one is here."""

    engine_id: str


class Refused(msgspec.Struct, frozen=True, tag="Refused"):
    """The reader may not read from this worker. In `reason`, `here` is the reader's side."""

    reason: str


ChannelRequest = Hello | ReaderWaits | ReaderDone | PollRequest
ChannelReply = Welcome | WrongStart | Refused


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The outer part of a message. Its first field never changes; later versions may have more fields."""

    version: int
    nonce: bytes
    """New for each request; a reply repeats its request's."""
    payload: bytes
    seal: bytes


class MalformedMessageError(Exception):
    """The bytes are no message of this protocol."""


ENVELOPES = msgspec.msgpack.Decoder(Envelope)
REQUESTS: "msgspec.msgpack.Decoder[ChannelRequest]" = msgspec.msgpack.Decoder(ChannelRequest)
REPLIES: "msgspec.msgpack.Decoder[ChannelReply]" = msgspec.msgpack.Decoder(ChannelReply)
NOTIFICATIONS = msgspec.msgpack.Decoder(ReaderDone)
"""Reads messages of `Transport.notify`, whose connection was made after a Welcome, so they need no envelope."""

Decoded = TypeVar("Decoded")


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def encode(message: ChannelRequest | ChannelReply, key: ClusterKey, *, nonce: bytes) -> bytes:
    """Writes a message, sealed with the key if there is one."""
    payload = msgspec.msgpack.encode(message)
    return msgspec.msgpack.encode(Envelope(CHANNEL_VERSION, nonce, payload, key.seal(nonce, payload)))


def read(decoder: "msgspec.msgpack.Decoder[Decoded]", body: bytes) -> Decoded:
    """Returns the decoded message. Raises Unreadable. Check version and seal of an envelope before it."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessageError(str(error)) from error


@dataclass(eq=False)
class SideChannelListener:
    """The listening end. Owns its socket."""

    socket: "zmq.Socket[bytes]"
    key: ClusterKey
    facts: KVFacts
    welcome: Welcome
    """The answer to readers that want to connect; its description changes when memory is offered anew."""

    def receive(self, tell: Callable[[News], None]) -> bool:
        """Reads all messages, passes them on as news, and answers them; never blocks. Drops a message that it cannot
        understand. Returns True if one came from somebody who may read from us."""
        from_reader = False
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
                    from_reader = True
                    if isinstance(request, Hello):
                        reply = self._greet(request)
                    elif not isinstance(request, PollRequest):
                        tell(request)
                if reply is not None:
                    self.socket.send_multipart([reader, encode(reply, self.key, nonce=envelope.nonce)], zmq.NOBLOCK)
            except (MalformedMessageError, zmq.ZMQError):  # a reader that is gone, or does not listen, gets no answer
                pass
            except Exception:  # no message may end the transfers of others
                logger.exception("a message of %d bytes cannot be understood; it is dropped", len(body))
        return from_reader

    def close(self) -> None:
        self.socket.close(linger=0)

    def _refusal_of(self, envelope: Envelope) -> Refused | None:
        """Returns what is wrong with a message; None if its payload can be read and trusted."""
        if envelope.version != CHANNEL_VERSION:
            return Refused(f"the side channel speaks version {envelope.version} here and {CHANNEL_VERSION} there")
        complaint = self.key.complaint(envelope.nonce, envelope.payload, seal=envelope.seal)
        return None if complaint is None else Refused(complaint)

    def _greet(self, hello: Hello) -> Welcome | WrongStart | Refused:
        if differences := hello.facts.differences(self.facts):
            return Refused("; ".join(differences))
        if hello.wanted != self.welcome.engine_id:
            return WrongStart(self.welcome.engine_id)
        return self.welcome


def listen(host: str, port: int, *, context: "zmq.Context[zmq.Socket[bytes]]") -> tuple["zmq.Socket[bytes]", str, int]:
    """Returns a bound socket, and the address and port for tickets. Raises a ConfigError that names the flag."""
    address = _bindable(host)
    if not 0 <= port <= 65535:
        raise ConfigError(f"--side-channel-port is {port}; a port is a number from 0 (a free one) to 65535")
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
        raise kind(f"--side-channel-port {port}: {error.strerror}; choose another one, or 0 for a free one") from error
    bound = listening.getsockopt_string(zmq.LAST_ENDPOINT)
    return listening, str(address), int(bound.rpartition(":")[2])


def endpoint(host: str, port: int) -> str:
    """Returns an address in ZeroMQ's form."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _bindable(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host or " ", None, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(found[0][4][0])
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"--side-channel-host {host!r} is not an address of this machine") from error
    if address.is_unspecified:
        raise ConfigError(
            f"--side-channel-host {host} stands for every interface, but the address is written into tickets: "
            "give the one at which other workers reach this machine"
        )
    return address


class SideChannelClient:
    """The asking end: a connection to one other worker, which may be slow, gone, or another program. Owns its socket,
    and keeps it in the poller. ZeroMQ reconnects by itself, more and more slowly."""

    def __init__(
        self,
        address: TransferAddress,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        poller: zmq.Poller,
        key: ClusterKey,
    ) -> None:
        """Raises TransferError if it cannot be an address."""
        self._poller, self._key = poller, key
        no_address = f"{address.host!r} port {address.port} is not an address of a worker"
        if not HOST.fullmatch(address.host):
            raise TransferError(no_address, FailureKind.UNREACHABLE)
        try:
            self._socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise TransferError(f"no socket is free: {error}", FailureKind.UNREACHABLE) from error
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
            raise TransferError(no_address, FailureKind.UNREACHABLE) from error
        self._poller.register(self._socket, zmq.POLLIN)

    def send(self, request: ChannelRequest, nonce: bytes) -> None:
        """Never blocks."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(request, self._key, nonce=nonce), zmq.NOBLOCK)

    def replies(self) -> list[tuple[bytes, ChannelReply]]:
        """Returns all replies, each with the nonce of its request. A reply that cannot be trusted becomes a Refused."""
        replies = []
        with contextlib.suppress(zmq.Again):
            for _ in range(REPLIES_PER_ROUND):
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
                with contextlib.suppress(MalformedMessageError):
                    envelope = read(ENVELOPES, parts[-1])
                    replies.append((envelope.nonce, self._believed(envelope)))
        return replies

    def close(self) -> None:
        self._poller.unregister(self._socket)
        self._socket.close()

    def _believed(self, envelope: Envelope) -> ChannelReply:
        """Returns the reply, or a Refused if it cannot be trusted. A refusal needs no seal."""
        if envelope.version != CHANNEL_VERSION:
            theirs = envelope.version
            return Refused(f"the side channel speaks version {CHANNEL_VERSION} here and {theirs} there")
        reply = read(REPLIES, envelope.payload)
        if isinstance(reply, Refused):
            return Refused(reply.reason[:MAX_REASON_CHARACTERS])
        if self._key.complaint(envelope.nonce, envelope.payload, seal=envelope.seal):
            return Refused("its answer is not sealed with the cluster key that is set here")
        return reply
