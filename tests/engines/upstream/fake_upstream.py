"""Sends requests to a fake server through a `TextUpstream`, and collects the pieces of each choice."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from motet.engines.http import server_client
from motet.engines.upstream.text_source import TextGroupStream, TextPiece, TextRequest, TextRoute, TextStep
from motet.engines.upstream.text_upstream import TextUpstream
from motet.engines.upstream.upstream_server import UpstreamOptions, UpstreamServer
from motet.engines.wire import EngineReport
from motet.errors import EngineSilentError
from motet.types import Usage
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.openai_script import Behaviour

ROUTES = (TextRoute.CHAT, TextRoute.COMPLETIONS)


def request_for(
    route: TextRoute = TextRoute.CHAT,
    *,
    n: int = 1,
    prompts: Sequence[str] = ("hi",),
    seed: int | None = 5,
    stream: bool = True,
    best_of: int | None = None,
    start: tuple[int, ...] | None = None,
    **fields: object,
) -> TextRequest:
    body: dict[str, object] = {"model": "m", "n": n, "stream": stream, **fields}
    if best_of is not None:
        body["best_of"] = best_of
    each: list[object] = []
    if route is TextRoute.CHAT:
        body["messages"] = [{"role": "user", "content": prompts[0]}]
    else:
        body["prompt"] = each = list(prompts)
    if seed is not None:
        body["seed"] = seed
    return TextRequest(
        route=route,
        body={name: raw(value) for name, value in body.items()},
        model="m",
        n=n,
        prompts=tuple(map(raw, each)),
        seed=seed,
        stream=stream,
        best_of=best_of,
        start=start,
    )


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


@dataclass
class ReceivedChoice:
    """The pieces of one choice, summed up."""

    text: str = ""
    finish: str | None = None
    roles: int = 0
    logprobs: int = 0
    pieces_after_finish: int = 0


@dataclass
class GroupAnswer:
    """The answer of a group, summed up."""

    choices: dict[int, ReceivedChoice] = field(default_factory=dict)
    usage: Usage | None = None

    def take(self, step: TextStep) -> None:
        for piece in step.pieces:
            received = self.choices.setdefault(piece.index, ReceivedChoice())
            received.pieces_after_finish += received.finish is not None
            _add(received, piece)

    def take_all(self, steps: Sequence[TextStep]) -> None:
        for step in steps:
            self.take(step)

    @property
    def texts(self) -> list[str]:
        assert sorted(self.choices) == list(range(len(self.choices)))
        return [self.choices[number].text for number in sorted(self.choices)]


def _add(received: ReceivedChoice, piece: TextPiece) -> None:
    fields = {name: msgspec.json.decode(value) for name, value in piece.fields.items()}
    message = fields.get("delta") or fields.get("message") or {"content": fields.get("text")}
    received.text += message.get("content") or ""
    received.roles += "role" in message
    received.logprobs += len((fields.get("logprobs") or {}).get("content", ()))
    received.finish = piece.finish or received.finish


async def read_all(group: TextGroupStream) -> GroupAnswer:
    answer = GroupAnswer()
    try:
        while steps := await group.read():
            answer.take_all(steps)
        answer.usage = group.usage
    finally:
        await group.aclose()
    return answer


@dataclass
class FakeUpstream:
    """A fake server, and a `TextUpstream` that uses it."""

    peer: FakeOpenAI
    upstream: TextUpstream

    async def answer(self, request: TextRequest) -> GroupAnswer:
        return await read_all(self.upstream.generate(request))


async def report_of(server: UpstreamServer) -> EngineReport:
    """Requests a report until there is one, as a keeper does: a machine can stall for longer than the time limit."""
    while True:
        with suppress(EngineSilentError):
            return await server.report()


@asynccontextmanager
async def fake_upstream(
    behaviour: Behaviour | None = None,
    *,
    options: UpstreamOptions | None = None,
    gated: bool = False,
    learn: bool = True,
) -> AsyncIterator[FakeUpstream]:
    """Starts a fake server. `learn`: the upstream first determines the abilities of the server. `gated`: the server
    sends nothing until its gate is released."""
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(FakeOpenAI(behaviour))
        client = await stack.enter_async_context(server_client())
        server = UpstreamServer(peer.url, client, options=options)
        upstream = TextUpstream(server, await report_of(server))
        stack.push_async_callback(upstream.close)
        if learn:
            await upstream.learn_abilities()
            peer.requests.clear()
        if gated:
            peer.close_gate()
        yield FakeUpstream(peer, upstream)
        upstream.check()
        await upstream.close()
        await peer.until_idle()
