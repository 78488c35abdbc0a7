"""What goes over the side channel, what the door makes of it, and what it makes of strangers."""

import secrets
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from motet.errors import ConfigError
from motet.transfer import channel
from motet.transfer.base import FailureKind, News, ReaderDone, ReaderWaits, TransferError
from motet.transfer.channel import Answer, Attend, Hello, Question, Refused, Release, SomeoneElse, Waits, Welcome
from motet.transfer.cluster_key import ClusterKey
from motet.transfer.door import Door, Visits, endpoint, listen
from motet.transfer.line import QUESTIONS_KEPT, Line, Lines
from motet.transfer.ticket import TransferAddress
from tests.transfer.scripted import FACTS, MEMORY
from tests.transfer.worker import dead_port

PATIENCE_MS = 10_000
HELLO = Hello("owner", FACTS)
WELCOME = Welcome("owner", b"how to connect", MEMORY)


class Town:
    """Keeps the sockets of a test, and closes them."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._kept: list[zmq.Socket[bytes]] = []

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> tuple["zmq.Socket[bytes]", int]:
        listening, _, port = listen(self.context, host, port)
        self._kept.append(listening)
        return listening, port

    def line(self, port: int, *, host: str = "127.0.0.1", key: str = "") -> tuple[Line, zmq.Poller]:
        poller = zmq.Poller()
        line = Line(Lines(self.context, poller, ClusterKey(key)), TransferAddress("owner", host, port))
        self._kept += [socket for socket, _ in poller.sockets]
        return line, poller

    def stranger(self, port: int) -> "zmq.Socket[bytes]":
        """Who may send anything."""
        socket = self.context.socket(zmq.DEALER)
        self._kept.append(socket)
        socket.connect(endpoint("127.0.0.1", port))
        return socket

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def town() -> Iterator[Town]:
    town = Town()
    yield town
    town.close()


class Street:
    """A door and a line to it, each with a cluster key of its own."""

    def __init__(self, town: Town, *, key_here: str = "", key_there: str = "") -> None:
        self.listening, self.port = town.listen()
        self.door = Door(self.listening, ClusterKey(key_there), FACTS, WELCOME)
        self.line, self.poller = town.line(self.port, key=key_here)

    def ask(self, question: Question) -> Answer:
        nonce = channel.new_nonce()
        self.line.say(question, nonce)
        self.visits()
        [(answered, answer)] = self.answers()
        assert answered == nonce
        return answer

    def answers(self) -> list[tuple[bytes, Answer]]:
        assert self.poller.poll(PATIENCE_MS)
        return self.line.answers()

    def tell(self, question: Question) -> list[News]:
        self.line.say(question, channel.new_nonce())
        return self.visits().news

    def visits(self) -> Visits:
        assert self.listening.poll(PATIENCE_MS)
        return self.door.visits()


def test_hello_is_answered_with_all_that_a_reader_needs(town: Town) -> None:
    assert Street(town).ask(HELLO) == WELCOME


def test_signs_of_life_and_releases_become_news(town: Town) -> None:
    street = Street(town)
    assert street.tell(Waits(5)) == [ReaderWaits(5)]
    assert street.tell(Release(5, "reader")) == [ReaderDone(5, "reader")]
    assert street.tell(Attend()) == []


def test_another_layout_is_refused_with_both_sides_shown_from_the_readers_side(town: Town) -> None:
    theirs = msgspec.structs.replace(FACTS, dtype="bfloat16", block_size=32)
    answer = Street(town).ask(Hello("owner", theirs))
    assert answer == Refused("dtype is bfloat16 here and float32 there; block_size is 32 here and 16 there")


def test_who_looks_for_an_earlier_start_of_the_worker_hears_that_it_is_gone(town: Town) -> None:
    assert Street(town).ask(Hello("the one before", FACTS)) == SomeoneElse("owner")


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ("secret", "", "a cluster key is set here and none there"),
        ("", "secret", "no cluster key is set here and one is set there"),
        ("secret", "other", "the cluster keys differ"),
    ],
)
def test_without_the_same_cluster_key_a_reader_hears_why_and_nothing_else(
    town: Town, here: str, there: str, reason: str
) -> None:
    street = Street(town, key_here=here, key_there=there)
    assert street.ask(HELLO) == Refused(reason)
    assert street.tell(Release(5, "reader")) == []
    assert street.tell(Waits(5)) == []


def test_the_same_cluster_key_lets_everything_through(town: Town) -> None:
    street = Street(town, key_here="secret", key_there="secret")
    assert street.ask(HELLO) == WELCOME
    assert street.tell(Waits(5)) == [ReaderWaits(5)]


def test_a_sealed_message_that_was_changed_on_the_way_is_refused() -> None:
    key = ClusterKey("secret")
    whole = channel.opened(channel.written(Release(5, "reader"), key, channel.new_nonce()))
    assert channel.complaint(whole, key) is None
    for changed in (
        msgspec.structs.replace(whole, payload=whole.payload.replace(b"\x05", b"\x06")),
        msgspec.structs.replace(whole, nonce=channel.new_nonce()),
        msgspec.structs.replace(whole, nonce=whole.nonce + whole.payload[:1], payload=whole.payload[1:]),
    ):
        assert changed != whole
        assert channel.complaint(changed, key)


def test_an_answer_that_is_not_sealed_with_our_key_is_not_believed(town: Town) -> None:
    router, port = town.listen()
    line, poller = town.line(port, key="secret")
    line.say(HELLO, channel.new_nonce())
    visitor, _ = router.recv_multipart()
    router.send_multipart([visitor, channel.written(WELCOME, ClusterKey("other"), channel.new_nonce())])
    assert poller.poll(PATIENCE_MS)
    [(_, answer)] = line.answers()
    assert answer == Refused("its answer is not sealed with the cluster key that is set here")


def test_another_version_of_the_protocol_is_refused_on_both_sides_with_both_shown(town: Town) -> None:
    street = Street(town)
    later = msgspec.msgpack.encode([2, b"nonce", b"payload of another form", b"", "a field more"])
    stranger = town.stranger(street.port)
    stranger.send(later)
    assert street.visits() == Visits()
    refusal = channel.opened(stranger.recv())
    assert channel.answer_in(refusal) == Refused("the side channel speaks version 2 here and 1 there")

    street.line.say(HELLO, channel.new_nonce())
    visitor, _ = street.listening.recv_multipart()
    street.listening.send_multipart([visitor, later])
    [(_, answer)] = street.answers()
    assert answer == Refused("the side channel speaks version 1 here and 2 there")


def junk() -> list[list[bytes]]:
    envelope = channel.opened(channel.written(HELLO, ClusterKey(""), channel.new_nonce()))
    return [
        [b""],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [secrets.token_bytes(1000)],
        [b"\x91" * 100_000],  # nested deeper than any stack
        [msgspec.msgpack.encode({"type": "Hello"})],
        [msgspec.msgpack.encode([1])],
        [msgspec.msgpack.encode([1, b"", b"junk", b""])],
        [msgspec.msgpack.encode([1, b"", msgspec.msgpack.encode({"type": "Hello", "wanted": 5}), b""])],
        [msgspec.msgpack.encode([1, b"", msgspec.msgpack.encode({"type": "Waits", "lease_id": "x"}), b""])],
        [msgspec.msgpack.encode([1, b"", msgspec.msgpack.encode(WELCOME), b""])],
        [msgspec.msgpack.encode(envelope), b"a part too many"],
        [b"", msgspec.msgpack.encode(envelope)],
    ]


@pytest.mark.parametrize("parts", junk(), ids=range(len(junk())))
def test_junk_is_not_answered_and_harms_nobody(town: Town, parts: list[bytes]) -> None:
    street = Street(town)
    stranger = town.stranger(street.port)
    stranger.send_multipart(parts)
    if len(parts[0]) <= channel.MAX_QUESTION_BYTES:
        assert street.visits() == Visits()
    assert street.ask(HELLO) == WELCOME
    assert not stranger.poll(0)


def test_a_message_beyond_the_bound_never_arrives(town: Town) -> None:
    street = Street(town)
    stranger = town.stranger(street.port)
    stranger.send(channel.written(HELLO, ClusterKey(""), channel.new_nonce()))
    street.visits()
    stranger.recv()
    long = Release(5, "r" * channel.MAX_QUESTION_BYTES)
    stranger.send(channel.written(long, ClusterKey(""), channel.new_nonce()))
    assert street.ask(HELLO) == WELCOME
    assert street.tell(Waits(6)) == [ReaderWaits(6)]


def test_what_is_said_to_a_worker_that_is_not_there_does_not_pile_up(town: Town) -> None:
    with dead_port() as port:
        line, _ = town.line(port)
        for _ in range(10 * QUESTIONS_KEPT):
            line.say(Waits(5), channel.new_nonce())
    back, _ = town.listen(port=port)
    assert back.poll(PATIENCE_MS)
    heard = 0
    while back.poll(300):
        back.recv_multipart()
        heard += 1
    assert 1 <= heard <= 2 * QUESTIONS_KEPT


@pytest.mark.parametrize("body", [b"", b"junk", msgspec.msgpack.encode({"lease_id": 1})])
def test_a_notification_that_is_none_of_ours_is_unreadable(body: bytes) -> None:
    with pytest.raises(channel.Unreadable):
        channel.release_in(body)
    assert channel.release_in(channel.notification(Release(1, "r"))) == Release(1, "r")


@pytest.mark.parametrize("host", ["a b", "", "x;127.0.0.1", "-", "tcp://h", "h/../x", "h\0x", "ü"])
def test_a_host_that_is_none_is_unreachable_at_once(town: Town, host: str) -> None:
    with pytest.raises(TransferError) as raised:
        town.line(1, host=host)
    assert raised.value.kind is FailureKind.UNREACHABLE


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*", "no-such-host.invalid", "203.0.113.7"])
def test_an_address_that_others_could_not_reach_is_an_error_that_names_the_flag(town: Town, host: str) -> None:
    with pytest.raises(ConfigError, match="--side-channel-host"):
        town.listen(host)


def test_a_taken_port_is_an_error_that_names_the_flag_and_the_port(town: Town) -> None:
    _, port = town.listen()
    with pytest.raises(ConfigError, match=f"--side-channel-port {port}: Address already in use"):
        town.listen(port=port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_an_error_that_names_the_flag(town: Town, port: int) -> None:
    with pytest.raises(ConfigError, match="--side-channel-port"):
        town.listen(port=port)


def test_a_name_is_resolved_before_it_is_bound(town: Town) -> None:
    listening, port = town.listen("localhost")
    assert port > 0
    assert listening.getsockopt_string(zmq.LAST_ENDPOINT) in (f"tcp://127.0.0.1:{port}", f"tcp://[::1]:{port}")
