"""The side channel's asking end: a line to one other worker, which may be slow, gone, or not what it should be."""

import contextlib
import re
from dataclasses import dataclass

import zmq

from motet.transfer import channel
from motet.transfer.base import FailureKind, TransferError
from motet.transfer.channel import Answer, Envelope, Question, Refused, Unreadable
from motet.transfer.cluster_key import ClusterKey
from motet.transfer.door import endpoint
from motet.transfer.ticket import TransferAddress

HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
"""Names and addresses; nothing else that ZeroMQ might find a meaning in."""
QUESTIONS_KEPT = 64
"""For a worker that does not answer; more are dropped. A lease that did not hear of its reader expires."""
ANSWERS_TAKEN = 64
"""In one round, whatever a worker sends."""
LINGER_MS = 200
"""How long what was said last may take to go out after `close`."""
REDIAL_MS = 100
REDIAL_MOST_MS = 10_000


@dataclass(frozen=True)
class Lines:
    """What every line of a worker is made with."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    poller: zmq.Poller
    key: ClusterKey


class Line:
    """Owns its socket, and keeps it in the poller. ZeroMQ redials by itself, ever more slowly."""

    def __init__(self, lines: Lines, address: TransferAddress) -> None:
        """Raises TransferError for what can be no address."""
        self._poller, self._key = lines.poller, lines.key
        no_address = f"{address.host!r} port {address.port} is no address of a worker"
        if not HOST.fullmatch(address.host):
            raise TransferError(no_address, FailureKind.UNREACHABLE)
        try:
            self._socket = lines.context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise TransferError(f"no socket is free: {error}", FailureKind.UNREACHABLE) from error
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, QUESTIONS_KEPT)
        self._socket.setsockopt(zmq.MAXMSGSIZE, channel.MAX_ANSWER_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, REDIAL_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, REDIAL_MOST_MS)
        try:
            self._socket.connect(endpoint(address.host, address.port))
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise TransferError(no_address, FailureKind.UNREACHABLE) from error
        self._poller.register(self._socket, zmq.POLLIN)

    def say(self, question: Question, nonce: bytes) -> None:
        """Never blocks."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(channel.written(question, self._key, nonce), zmq.NOBLOCK)

    def answers(self) -> list[tuple[bytes, Answer]]:
        """What has come, each with the nonce of its question. What cannot be believed has become Refused."""
        heard = []
        with contextlib.suppress(zmq.Again):
            for _ in range(ANSWERS_TAKEN):
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
                with contextlib.suppress(Unreadable):
                    envelope = channel.opened(parts[-1])
                    heard.append((envelope.nonce, self._believed(envelope)))
        return heard

    def close(self) -> None:
        self._poller.unregister(self._socket)
        self._socket.close()

    def _believed(self, envelope: Envelope) -> Answer:
        """A refusal needs no seal: who has no key cannot make one."""
        if envelope.version != channel.CHANNEL_VERSION:
            theirs = envelope.version
            return Refused(f"the side channel speaks version {channel.CHANNEL_VERSION} here and {theirs} there")
        answer = channel.answer_in(envelope)
        if isinstance(answer, Refused):
            return Refused(answer.reason[: channel.MAX_REASON_CHARACTERS])
        if self._key.complaint(envelope.nonce, envelope.payload, envelope.seal):
            return Refused("its answer is not sealed with the cluster key that is set here")
        return answer
