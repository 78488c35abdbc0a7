"""The side channel's messages, byte for byte, and the behaviour of both ends with them and with messages from
strangers."""

import secrets
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from motet.errors import ConfigError
from motet.transfer.orders import FailureKind, ReaderDone, ReaderHeartbeat, TransferEvent
from motet.transfer.side_channel import (
    CHANNEL_VERSION,
    ENVELOPES,
    MAX_REQUEST_BYTES,
    NOTIFICATIONS,
    REPLIES,
    REQUESTS,
    REQUESTS_QUEUED,
    ChannelReply,
    ChannelRequest,
    Hello,
    MalformedMessageError,
    PollRequest,
    Refused,
    SideChannelClient,
    SideChannelListener,
    Welcome,
    WrongStart,
    encode,
    endpoint,
    listen,
    new_nonce,
    read,
)
from motet.transfer.ticket import ClusterKey, TransferAddress
from motet.transfer.transport import RegisteredMemory
from tests.transfer.memory import failing
from tests.transfer.scripted import FACTS, MEMORY
from tests.transfer.worker import dead_port

PATIENCE_MS = 10_000
NO_KEY = ClusterKey("")
HELLO = Hello("owner", FACTS)
WELCOME = Welcome("owner", b"a description", MEMORY)

NONCE = b"n" * 16
SOME_MEMORY = RegisteredMemory(regions=(4096, 8192), region_block_bytes=64, num_blocks=8, proof=12288, proof_entries=12)
RECORDED: dict[str, tuple[ChannelRequest | ChannelReply, str, str]] = {
    "hello": (
        Hello("p", FACTS),
        "",
        "9402c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec49383a474797065a548656c6c6fa677616e746564a170a5666163747389ac6d6f6465"
        "6c5f646967657374a16dac7175616e74697a6174696f6ea46e6f6e65a56474797065a7666c6f61743332aa626c6f636b5f73697a6510aa"
        "6e756d5f6c617965727301ac6e756d5f6b765f686561647301a8686561645f64696d08a97472616e73706f7274a46e69786ca776657273"
        "696f6e01c400",
    ),
    "heartbeat": (
        ReaderHeartbeat(5),
        "",
        "9402c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec41682a474797065a55761697473a86c656173655f696405c400",
    ),
    "done": (
        ReaderDone(5, "d:1"),
        "",
        "9402c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec42383a474797065a752656c65617365a86c656173655f696405a6726561646572a364"
        "3a31c400",
    ),
    "poll request": (PollRequest(), "", "9402c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec40d81a474797065a6417474656e64c400"),
    "welcome": (
        Welcome("p", b"how", SOME_MEMORY),
        "",
        "9402c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec48284a474797065a757656c636f6d65a9656e67696e655f6964a170ab646573637269"
        "7074696f6ec403686f77a66d656d6f727986a7726567696f6e7392cd1000cd2000b2726567696f6e5f626c6f636b5f627974657340aa6e"
        "756d5f626c6f636b7308a6646576696365ffa570726f6f66cd3000ad70726f6f665f656e74726965730cc400",
    ),
    "wrong start": (
        WrongStart("p2"),
        "",
        "9402c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec41f82a474797065ab536f6d656f6e65456c7365a9656e67696e655f6964a27032c400",
    ),
    "refused": (
        Refused("no"),
        "",
        "9402c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec41882a474797065a752656675736564a6726561736f6ea26e6fc400",
    ),
    "sealed": (
        ReaderHeartbeat(5),
        "secret",
        "9402c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec41682a474797065a55761697473a86c656173655f696405c42012854ef8195cd74d49"
        "ed5ecbf6e8c15b7f62153224d2a286d3e4b02f7df1f4fe",
    ),
}
"""Encoding of each message in version 2 of the protocol, with the nonce NONCE: (message, cluster key, bytes in hex)."""


@pytest.mark.parametrize(("message", "key", "recorded"), RECORDED.values(), ids=RECORDED)
def test_the_encoding_of_messages_is_unchanged_in_this_version(
    message: ChannelRequest | ChannelReply, key: str, recorded: str
) -> None:
    assert CHANNEL_VERSION == 2, "record the bytes of the new version"
    assert encode(message, ClusterKey(key), nonce=NONCE).hex() == recorded
    envelope = read(ENVELOPES, bytes.fromhex(recorded))
    assert ClusterKey(key).seal_error(envelope.nonce, envelope.payload, seal=envelope.seal) is None
    if isinstance(message, Welcome | WrongStart | Refused):
        assert read(REPLIES, envelope.payload) == message
    else:
        assert read(REQUESTS, envelope.payload) == message


def test_the_encoding_of_a_notification_is_unchanged() -> None:
    recorded = bytes.fromhex("83a474797065a752656c65617365a86c656173655f696405a6726561646572a3643a31")
    assert msgspec.msgpack.encode(ReaderDone(5, "d:1")) == recorded
    assert read(NOTIFICATIONS, recorded) == ReaderDone(5, "d:1")


class Sockets:
    """Makes the sockets of a test, and closes them."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> tuple["zmq.Socket[bytes]", int]:
        listening, _, port = listen(host, port, context=self.context)
        self._sockets.append(listening)
        return listening, port

    def client(self, port: int, *, host: str = "127.0.0.1", key: str = "") -> tuple[SideChannelClient, zmq.Poller]:
        poller = zmq.Poller()
        client = SideChannelClient(
            TransferAddress("owner", host, port), self.context, poller=poller, key=ClusterKey(key)
        )
        self._sockets += [socket for socket, _ in poller.sockets]
        return client, poller

    def stranger(self, port: int) -> "zmq.Socket[bytes]":
        """Returns a socket on which a test can send anything to the listener."""
        socket = self.context.socket(zmq.DEALER)
        self._sockets.append(socket)
        socket.connect(endpoint("127.0.0.1", port))
        return socket

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


class Pair:
    """A listener and a client, each with its own cluster key."""

    def __init__(self, sockets: Sockets, *, key_here: str = "", key_there: str = "") -> None:
        self.listening, self.port = sockets.listen()
        self.listener = SideChannelListener(self.listening, ClusterKey(key_there), FACTS, WELCOME)
        self.client, self.poller = sockets.client(self.port, key=key_here)

    def request(self, request: ChannelRequest) -> ChannelReply:
        """Sends a request, and returns the reply to it."""
        nonce = new_nonce()
        self.client.send(request, nonce)
        self.receive()
        [(replied_to, reply)] = self.replies()
        assert replied_to == nonce
        return reply

    def replies(self) -> list[tuple[bytes, ChannelReply]]:
        assert self.poller.poll(PATIENCE_MS)
        return self.client.replies()

    def events_from(self, request: ChannelRequest) -> list[TransferEvent]:
        """Sends a request, and returns the events that the listener publishes."""
        self.client.send(request, new_nonce())
        events: list[TransferEvent] = []
        self.receive(events)
        return events

    def receive(self, events: list[TransferEvent] | None = None) -> bool:
        """Returns True if the message came from a worker that may read."""
        assert self.listening.poll(PATIENCE_MS)
        return self.listener.receive(([] if events is None else events).append)

    def reply_with(self, body: bytes) -> list[tuple[bytes, ChannelReply]]:
        """Sends a reply with this body, and returns the replies that the client reads."""
        self.client.send(HELLO, new_nonce())
        reader, _ = self.listening.recv_multipart()
        self.listening.send_multipart([reader, body])
        return self.replies()


def test_hello_is_answered_with_everything_that_a_reader_needs(sockets: Sockets) -> None:
    assert Pair(sockets).request(HELLO) == WELCOME


def test_heartbeats_and_releases_become_events(sockets: Sockets) -> None:
    pair = Pair(sockets)
    assert pair.events_from(ReaderHeartbeat(5)) == [ReaderHeartbeat(5)]
    assert pair.events_from(ReaderDone(5, "reader")) == [ReaderDone(5, "reader")]
    assert pair.events_from(PollRequest()) == []


def test_another_layout_is_refused_with_both_sides_shown_from_the_readers_side(sockets: Sockets) -> None:
    other = msgspec.structs.replace(FACTS, dtype="bfloat16", block_size=32)
    reply = Pair(sockets).request(Hello("owner", other))
    assert reply == Refused("dtype is bfloat16 here and float32 there; block_size is 32 here and 16 there")


def test_a_reader_that_names_an_earlier_start_of_the_worker_gets_an_error(sockets: Sockets) -> None:
    assert Pair(sockets).request(Hello("the one before", FACTS)) == WrongStart("owner")


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ("secret", "", "a cluster key is set here and none there"),
        ("", "secret", "no cluster key is set here and one is set there"),
        ("secret", "other", "the cluster keys differ"),
    ],
)
def test_without_the_same_cluster_key_a_reader_gets_the_reason_and_nothing_else(
    sockets: Sockets, here: str, there: str, reason: str
) -> None:
    pair = Pair(sockets, key_here=here, key_there=there)
    assert pair.request(HELLO) == Refused(reason)
    assert pair.events_from(ReaderDone(5, "reader")) == []
    assert pair.events_from(ReaderHeartbeat(5)) == []


def test_messages_with_the_same_cluster_key_are_accepted(sockets: Sockets) -> None:
    pair = Pair(sockets, key_here="secret", key_there="secret")
    assert pair.request(HELLO) == WELCOME
    assert pair.events_from(ReaderHeartbeat(5)) == [ReaderHeartbeat(5)]


def test_a_sealed_message_that_was_changed_on_the_way_is_refused() -> None:
    key = ClusterKey("secret")
    sealed = read(ENVELOPES, encode(ReaderDone(5, "reader"), key, nonce=new_nonce()))
    assert key.seal_error(sealed.nonce, sealed.payload, seal=sealed.seal) is None
    for changed in (
        msgspec.structs.replace(sealed, payload=sealed.payload.replace(b"\x05", b"\x06")),
        msgspec.structs.replace(sealed, nonce=new_nonce()),
        msgspec.structs.replace(sealed, nonce=sealed.nonce + sealed.payload[:1], payload=sealed.payload[1:]),
    ):
        assert changed != sealed
        assert key.seal_error(changed.nonce, changed.payload, seal=changed.seal)


def test_a_reply_that_is_sealed_with_another_key_is_refused(sockets: Sockets) -> None:
    pair = Pair(sockets, key_here="secret")
    [(_, reply)] = pair.reply_with(encode(WELCOME, ClusterKey("other"), nonce=new_nonce()))
    assert reply == Refused("its reply is not sealed with the cluster key that is set here")


def test_another_version_of_the_protocol_is_refused_on_both_sides_with_both_shown(sockets: Sockets) -> None:
    pair = Pair(sockets)
    later = msgspec.msgpack.encode([CHANNEL_VERSION + 1, b"nonce", b"payload of another form", b"", "another field"])
    stranger = sockets.stranger(pair.port)
    stranger.send(later)
    assert not pair.receive()
    refusal = read(ENVELOPES, stranger.recv())
    assert read(REPLIES, refusal.payload) == Refused("the side channel has version 3 here and version 2 there")
    [(_, reply)] = pair.reply_with(later)
    assert reply == Refused("the side channel has version 2 here and version 3 there")


def payload(**fields: object) -> bytes:
    """Returns an envelope of this version with arbitrary fields as its payload."""
    return msgspec.msgpack.encode([CHANNEL_VERSION, NONCE, msgspec.msgpack.encode(fields), b""])


def memory(**changes: object) -> dict[str, object]:
    return {**msgspec.to_builtins(SOME_MEMORY), **changes}


NOT_UTF8 = b"\xa1\xff"
JUNK: list[bytes] = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    secrets.token_bytes(1000),
    b"\x91" * 60_000,  # nested deeper than any stack
    b"\xdd\xff\xff\xff\xff",  # an array of four billion
    b"\x94\x02\xc6\xff\xff\xff\xff",  # a nonce of four billion bytes
    msgspec.msgpack.encode({"type": "Hello"}),
    msgspec.msgpack.encode([CHANNEL_VERSION]),
    msgspec.msgpack.encode(["1", b"", b"", b""]),
    msgspec.msgpack.encode([CHANNEL_VERSION, "text", b"", b""]),
    msgspec.msgpack.encode([CHANNEL_VERSION, b"", b"junk", b""]),
    msgspec.msgpack.encode([CHANNEL_VERSION, b"", b"\x91" * 60_000, b""]),
    msgspec.msgpack.encode([CHANNEL_VERSION, b"", msgspec.msgpack.encode(["Waits", 5]), b""]),
    payload(),
    payload(type="Surprise"),
    payload(type=5),
    payload(type="Hello", requested=5),
    payload(type="Hello", requested="owner", facts=[]),
    payload(type="Waits", lease_id="x"),
    payload(type="Waits", lease_id=5.5),
    payload(type="Waits", lease_id=None),
    payload(type="Release", lease_id=5),
    payload(type="Welcome", engine_id="owner", description="text", memory=memory()),
    payload(type="Welcome", engine_id="owner", description=b"", memory=[]),
    payload(type="Welcome", engine_id="owner", description=b"", memory=memory(regions=(4096, -1))),
    payload(type="Welcome", engine_id="owner", description=b"", memory=memory(regions=(4096, 2**63))),
    payload(type="Welcome", engine_id="owner", description=b"", memory=memory(region_block_bytes=-64)),
    payload(type="Welcome", engine_id="owner", description=b"", memory=memory(num_blocks=-1)),
    payload(type="Welcome", engine_id="owner", description=b"", memory=memory(device=-2)),
    payload(type="Welcome", engine_id="owner", description=b"", memory=memory(proof=-8)),
    payload(type="Welcome", engine_id="owner", description=b"", memory=memory(proof_entries=2**64 - 1)),
    payload(type="Refused", reason=5),
    payload(type="Release", lease_id=5, reader="?").replace(b"\xa1?", NOT_UTF8),
    payload(type="Refused", reason="?").replace(b"\xa1?", NOT_UTF8),
]


@pytest.mark.parametrize("body", JUNK, ids=range(len(JUNK)))
def test_junk_affects_neither_end_and_is_not_answered(sockets: Sockets, body: bytes) -> None:
    pair = Pair(sockets)
    stranger = sockets.stranger(pair.port)
    stranger.send(body)
    assert not pair.receive()
    assert pair.reply_with(body) == []
    assert pair.request(HELLO) == WELCOME
    assert not stranger.poll(0)


@pytest.mark.parametrize("seal", [b"", b"short", "ä".encode(), bytes(32), bytes(10_000)])
@pytest.mark.parametrize("nonce", [b"", b"short", NONCE, bytes(10_000)])
def test_a_seal_and_a_nonce_of_any_length_are_only_refused(sockets: Sockets, seal: bytes, nonce: bytes) -> None:
    pair = Pair(sockets, key_here="secret", key_there="secret")
    forged = msgspec.msgpack.encode([CHANNEL_VERSION, nonce, msgspec.msgpack.encode(WELCOME), seal])
    stranger = sockets.stranger(pair.port)
    stranger.send(forged)
    assert not pair.receive()
    assert isinstance(read(REPLIES, read(ENVELOPES, stranger.recv()).payload), Refused)
    [(_, reply)] = pair.reply_with(forged)
    assert isinstance(reply, Refused)
    assert pair.request(HELLO) == WELCOME


@pytest.mark.parametrize(("before", "after"), [([b""], []), ([], [b"more"])])
def test_a_message_with_an_additional_part_is_dropped(
    sockets: Sockets, before: list[bytes], after: list[bytes]
) -> None:
    pair = Pair(sockets)
    stranger = sockets.stranger(pair.port)
    stranger.send_multipart([*before, encode(HELLO, NO_KEY, nonce=NONCE), *after])
    assert not pair.receive()
    assert pair.request(HELLO) == WELCOME
    assert not stranger.poll(0)


def test_a_message_that_is_too_long_never_arrives(sockets: Sockets) -> None:
    pair = Pair(sockets)
    stranger = sockets.stranger(pair.port)
    stranger.send(encode(HELLO, NO_KEY, nonce=new_nonce()))
    pair.receive()
    stranger.recv()
    stranger.send(encode(ReaderDone(5, "r" * MAX_REQUEST_BYTES), NO_KEY, nonce=new_nonce()))
    assert pair.request(HELLO) == WELCOME
    assert pair.events_from(ReaderHeartbeat(6)) == [ReaderHeartbeat(6)]


@pytest.mark.slow
def test_the_number_of_messages_queued_for_an_absent_worker_is_limited(sockets: Sockets) -> None:
    with dead_port() as port:
        client, _ = sockets.client(port)
        for _ in range(10 * REQUESTS_QUEUED):
            client.send(ReaderHeartbeat(5), new_nonce())
    listening, _ = sockets.listen(port=port)
    assert listening.poll(PATIENCE_MS)
    num_received = 0
    while listening.poll(300):
        listening.recv_multipart()
        num_received += 1
    assert 1 <= num_received <= 2 * REQUESTS_QUEUED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        msgspec.msgpack.encode({"lease_id": 1}),
        msgspec.msgpack.encode(ReaderDone(1, "?"))[:-2] + NOT_UTF8,
    ],
)
def test_a_notification_of_another_protocol_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        read(NOTIFICATIONS, body)


@pytest.mark.parametrize("host", ["a b", "", "x;127.0.0.1", "-", "tcp://h", "h/../x", "h\0x", "ü"])
def test_an_invalid_host_is_unreachable_at_once(sockets: Sockets, host: str) -> None:
    with failing(FailureKind.UNREACHABLE):
        sockets.client(1, host=host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*", "no-such-host.invalid", "203.0.113.7"])
def test_an_address_that_no_other_worker_can_reach_is_an_error_that_names_the_flag(sockets: Sockets, host: str) -> None:
    with pytest.raises(ConfigError, match="--side-channel-host"):
        sockets.listen(host)


def test_a_taken_port_is_an_error_that_names_the_flag_and_the_port(sockets: Sockets) -> None:
    _, port = sockets.listen()
    with pytest.raises(ConfigError, match=f"--side-channel-port {port}: Address already in use"):
        sockets.listen(port=port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_invalid_port_is_an_error_that_names_the_flag(sockets: Sockets, port: int) -> None:
    with pytest.raises(ConfigError, match="--side-channel-port"):
        sockets.listen(port=port)


def test_a_name_is_resolved_before_it_is_bound(sockets: Sockets) -> None:
    listening, port = sockets.listen("localhost")
    assert port > 0
    assert listening.getsockopt_string(zmq.LAST_ENDPOINT) in (f"tcp://127.0.0.1:{port}", f"tcp://[::1]:{port}")
