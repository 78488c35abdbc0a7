"""What a server can, found out by asking it for two choices of one token, streamed and whole.

    answers with indices 0 and 1, streamed and whole    n is honoured
    any other answer, or a refusal                      it is not: choices are asked for one by one
    a server error, no answer, nonsense                 nothing is known: one by one as well, and asked again later

A request that is refused is tried in other words, since a server may refuse the words and not the number:
`max_completion_tokens` in place of `max_tokens`, and a stream without `stream_options`.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from motet.engines.refusal import NO_SUCH_ROUTE, NOT_TAKEN
from motet.engines.sse import DONE, EventSplitter
from motet.engines.upstream.base import TextRoute
from motet.engines.upstream.client import Ids, UpstreamServer
from motet.engines.upstream.shapes import read_told
from motet.errors import EngineError, MotetError, UpstreamRefusalError

PROBE_S = 20.0
"""For all that is asked of one model."""
CHOICES = 2
MAX_PROBE_BYTES = 2**20

PROMPTS: dict[TextRoute, tuple[str, object]] = {
    TextRoute.CHAT: ("messages", [{"role": "user", "content": "Hi"}]),
    TextRoute.COMPLETIONS: ("prompt", "Hi"),
}
LIMITS: dict[TextRoute, tuple[str, ...]] = {
    TextRoute.CHAT: ("max_tokens", "max_completion_tokens"),
    TextRoute.COMPLETIONS: ("max_tokens",),
}


class Ability(msgspec.Struct, frozen=True, kw_only=True):
    """On one route. By default what is safe with any server."""

    there: bool = True
    """Whether the server has the route."""
    honours_n: bool = False
    takes_usage: bool = False
    """Whether its streams take `stream_options`."""


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model on one server."""

    chat: Ability = Ability()
    completions: Ability = Ability()

    def on(self, route: TextRoute) -> Ability:
        return self.chat if route is TextRoute.CHAT else self.completions


@dataclass(frozen=True)
class _Words:
    limit: str
    usage: bool
    """Whether `stream_options` are sent."""


async def probe(server: UpstreamServer, model: str, *, ids: Ids, limit_s: float = PROBE_S) -> Abilities | None:
    """`model`: the server's name for it. None: nothing is known."""
    try:
        async with asyncio.timeout(limit_s):
            chat = await _Probe(server, model, TextRoute.CHAT, ids).run()
            completions = await _Probe(server, model, TextRoute.COMPLETIONS, ids).run()
    except (MotetError, TimeoutError):
        return None
    return Abilities(chat=chat, completions=completions) if chat.there or completions.there else None


class _Probe:
    """Of one route."""

    def __init__(self, server: UpstreamServer, model: str, route: TextRoute, ids: Ids) -> None:
        self._server = server
        self._model = model
        self._route = route
        self._ids = ids

    async def run(self) -> Ability:
        """Raises MotetError if nothing can be said."""
        words = [_Words(limit, usage) for limit in LIMITS[self._route] for usage in (True, False)]
        for n in (CHOICES, 1):  # with one: whether it is the number that was refused
            for tried in words:
                try:
                    honours_n = await self._brings(n, tried) and n > 1
                except UpstreamRefusalError as error:
                    if error.status in NO_SUCH_ROUTE:
                        return Ability(there=False)
                    if error.status not in NOT_TAKEN:
                        raise
                else:
                    return Ability(honours_n=honours_n, takes_usage=tried.usage)
        return Ability()

    async def _brings(self, n: int, words: _Words) -> bool:
        """Whether `n` choices come, each with its own number and its end, streamed and whole."""
        asked = set(range(n))
        return await self._ended(n, words, stream=True) == asked and await self._ended(n, words, stream=False) == asked

    async def _ended(self, n: int, words: _Words, *, stream: bool) -> set[int]:
        """Numbers of the choices that ended."""
        name, prompt = PROMPTS[self._route]
        body = {"model": self._model, name: prompt, "n": n, words.limit: 1, "temperature": 1, "stream": stream}
        if stream and words.usage:
            body["stream_options"] = {"include_usage": True}
        reply = await self._server.post(self._route, msgspec.json.encode(body), self._ids)
        try:
            if reply.is_stream is not stream:
                raise EngineError(f"{self._server.name} does not stream as it is asked to")
            said = await reply.whole(max_bytes=MAX_PROBE_BYTES)
        finally:
            reply.close()
        told = (
            [read_told(event) for event in EventSplitter().feed(said) if event != DONE] if stream else [read_told(said)]
        )
        return {choice.index for chunk in told for choice in chunk.choices if choice.finish is not None}
