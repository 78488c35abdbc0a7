"""Hostile orders and messages have no effect on other orders and messages, and leave nothing open."""

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from motet.engine_orders import Connect
from motet.engines.wire import StopChoice
from motet.testing.fake_engine import NOWHERE
from motet.text.tokenizer import Tokenizer
from motet.transfer import orders, side_channel
from motet.transfer.orders import ReaderDone, ReaderHeartbeat
from motet.transfer.ticket import ClusterKey, TransferAddress, params_of
from motet.types import Role, SamplingParams
from tests.api.engine_requests import group, post
from tests.api.serving import Served, Serving, WatchedEngine
from tests.attack.mutants import mutants
from tests.transfer.scripted import FACTS, MEMORY

pytestmark = pytest.mark.anyio
PATIENCE_MS = 10_000

COUNT = 30
"""Number of hostile messages of each kind. Each takes about a millisecond."""
ALL_FIELDS = SamplingParams(max_tokens=9, logprobs=2, stop_token_ids=(3,), logit_bias={4: 1.0}, min_tokens=1)


@pytest.fixture
async def serve(folder: Path) -> AsyncIterator[Serving]:
    async with AsyncExitStack() as stack:
        yield Serving(Tokenizer.load(folder), stack)


def address() -> TransferAddress:
    return TransferAddress("e", "127.0.0.1", 9)


async def status_of(served: Served, path: str, body: bytes) -> int:
    status = (await post(served, path, body)).status_code
    assert status < 500, (path, body)
    return status


@pytest.mark.slow
@pytest.mark.parametrize("role", Role)
async def test_no_order_of_a_gateway_affects_another_one(serve: Serving, role: Role) -> None:
    served = await serve(engine=WatchedEngine(role=role))
    ticket = served.engine.leases.grant(group(), NOWHERE, readers=1, block_size=16)
    request = group(sampling=ALL_FIELDS, ticket=ticket if role is Role.DECODE else None)
    valid = {
        "/engine/generate": request,
        "/engine/prefill": msgspec.structs.replace(request, ticket=None),
        "/engine/release": ticket,
        "/engine/stop": StopChoice(request_id=request.request_id, index=0),
        "/engine/order": Connect(address()),
    }
    for seed, (path, message) in enumerate(valid.items()):
        for body in mutants(message, seed=seed, count=COUNT):
            await status_of(served, path, body)
    served.engine.leases.held.clear()  # leases of the ticket, and of mutants that are valid prefills
    path = "/engine/prefill" if role is Role.PREFILL else "/engine/generate"
    assert await status_of(served, path, msgspec.msgpack.encode(group())) == 200
    served.engine.leases.held.clear()
    await served.until_empty()


@pytest.mark.slow
async def test_no_ticket_of_a_client_affects_another_request(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(role=Role.DECODE))
    ticket = served.engine.leases.grant(group(), NOWHERE, readers=1, block_size=16)
    for body in mutants(params_of(ticket), seed=1, count=3 * COUNT):
        try:
            params = msgspec.msgpack.decode(body)
            content = json.dumps({"prompt": [5, 6, 7], "max_tokens": 3, "kv_transfer_params": params})
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError):  # JSON cannot represent it
            continue
        response = await served.http.post("/v1/completions", content=content)
        assert response.status_code < 500, content
    served.engine.leases.held.clear()
    answer = await served.http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3})
    assert answer.status_code == 200
    await served.until_empty()


@pytest.mark.parametrize("secret", ["", "secret"])
def test_no_message_to_a_side_channel_affects_another_one(secret: str) -> None:
    key, events, answered = ClusterKey(secret), list[orders.TransferEvent](), False
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listening, _, port = side_channel.listen("127.0.0.1", 0, context=context)
    welcome = side_channel.Welcome("e", b"p", MEMORY)
    listener = side_channel.SideChannelListener(listening, key, FACTS, welcome)
    with contextlib.closing(listener), context.socket(zmq.DEALER) as reader:
        reader.connect(side_channel.endpoint("127.0.0.1", port))
        valid = (side_channel.Hello("e", FACTS), side_channel.PollRequest(), ReaderHeartbeat(1), ReaderDone(1, "r"))
        for seed, message in enumerate(valid):
            for payload in mutants(message, seed=seed, count=COUNT):
                nonce = side_channel.new_nonce()
                envelope = side_channel.Envelope(1, nonce, payload, key.seal(nonce, payload))
                for body in (msgspec.msgpack.encode(envelope), *mutants(envelope, seed=seed, count=1)):
                    reader.send(body)
        nonce = side_channel.new_nonce()
        while not answered:
            reader.send(side_channel.encode(valid[0], key, nonce=nonce))
            assert listening.poll(PATIENCE_MS)
            listener.receive(events.append)
            while not answered and reader.poll(1):
                reply = side_channel.read(side_channel.ENVELOPES, reader.recv())
                answered = reply.nonce == nonce and side_channel.read(side_channel.REPLIES, reply.payload) == welcome
    context.term()
    assert {type(event) for event in events} <= {ReaderHeartbeat, ReaderDone}
