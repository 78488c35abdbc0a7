"""Where other workers knock: the side channel's listening end.

Anybody may send anything to the port. What is no message of ours is dropped without an answer; what is, but without the
right cluster key, hears why and nothing else.
"""

import contextlib
import ipaddress
import socket
from dataclasses import dataclass, field

import zmq

from motet.errors import ConfigError, PortTakenError
from motet.transfer import channel
from motet.transfer.base import News, ReaderDone, ReaderWaits
from motet.transfer.channel import Attend, Hello, Refused, Release, SomeoneElse, Unreadable, Waits, Welcome
from motet.transfer.cluster_key import ClusterKey
from motet.transfer.layout import KVFacts

MAX_VISITS = 256
"""Messages taken in one round, so that a flood does not starve the transfers."""
ANSWERS_KEPT = 64
"""For one visitor who does not read them; more are dropped."""


@dataclass
class Visits:
    """What came in one round."""

    welcome: bool = False
    """Whether anybody came who may read from us."""
    news: list[News] = field(default_factory=list)


class Door:
    """Owns the listening socket."""

    def __init__(self, listening: "zmq.Socket[bytes]", key: ClusterKey, facts: KVFacts, welcome: Welcome) -> None:
        self._socket = listening
        self._key = key
        self._facts = facts
        self._welcome = welcome

    def visits(self) -> Visits:
        """Takes what has come, and answers; never blocks."""
        visits = Visits()
        for _ in range(MAX_VISITS):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) == 2:
                visitor, body = parts
                if answer := self._heard(body, visits):
                    self._answer(visitor, answer)
        return visits

    def close(self) -> None:
        self._socket.close(linger=0)

    def _heard(self, body: bytes, visits: Visits) -> bytes | None:
        """The answer, if there must be one."""
        try:
            envelope = channel.opened(body)
            if reason := channel.complaint(envelope, self._key):
                return channel.written(Refused(reason), self._key, envelope.nonce)
            question = channel.question_in(envelope)
        except Unreadable:
            return None
        visits.welcome = True
        match question:
            case Hello():
                return channel.written(self._greeting(question), self._key, envelope.nonce)
            case Waits(lease_id):
                visits.news.append(ReaderWaits(lease_id))
            case Release(lease_id, reader):
                visits.news.append(ReaderDone(lease_id, reader))
            case Attend():
                pass
        return None

    def _greeting(self, hello: Hello) -> Welcome | SomeoneElse | Refused:
        if differences := hello.facts.differences(self._facts):
            return Refused("; ".join(differences))
        if hello.wanted != self._welcome.engine_id:
            return SomeoneElse(self._welcome.engine_id)
        return self._welcome

    def _answer(self, visitor: bytes, answer: bytes) -> None:
        with contextlib.suppress(zmq.Again, zmq.ZMQError):  # who has gone, or does not listen, gets none
            self._socket.send_multipart([visitor, answer], zmq.NOBLOCK)


def listen(context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int) -> tuple["zmq.Socket[bytes]", str, int]:
    """A bound socket, and the address and port that tickets will carry. A ConfigError names the flag."""
    address = _bindable(host)
    if not 0 <= port <= 65535:
        raise ConfigError(f"--side-channel-port is {port}; a port is a number from 0 (a free one) to 65535")
    listening = context.socket(zmq.ROUTER)
    listening.setsockopt(zmq.IPV6, address.version == 6)
    listening.setsockopt(zmq.LINGER, 0)
    listening.setsockopt(zmq.MAXMSGSIZE, channel.MAX_QUESTION_BYTES)
    listening.setsockopt(zmq.SNDHWM, ANSWERS_KEPT)
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
    """In ZeroMQ's spelling."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _bindable(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host or " ", None, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(found[0][4][0])
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"--side-channel-host {host!r} is no address of this machine") from error
    if address.is_unspecified:
        raise ConfigError(
            f"--side-channel-host {host} stands for every interface, but the address is written into tickets: "
            "give the one at which other workers reach this machine"
        )
    return address
