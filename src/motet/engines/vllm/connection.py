"""One request of a group on its way: a connection, and which choices get what it brings.

    open ──► read, hand over, wait until the reader has taken it ──► read ... ──► end

Closing the connection ends the request there. That is done when nobody listens to its children any more, unless all of
them have finished: then the rest of the answer is read, so that the connection can be used again.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from motet.engines.vllm.ask import Ask
from motet.engines.vllm.plan import PlannedAsk
from motet.engines.vllm.wire import Piece, Usage
from motet.errors import EngineDiedError
from motet.types import GenerateRequest, TokenLogprob


class Answering(Protocol):
    """An answer as it streams."""

    async def read(self) -> list[Piece | Usage]:
        """At least something; empty at the end."""
        ...

    def close(self) -> None: ...


class Generating(Protocol):
    """The server, as groups ask it (`VLLMServer`)."""

    @property
    def name(self) -> str: ...

    async def open(self, ask: Ask, *, trace: str = "", session_id: str = "") -> Answering: ...

    async def prompt_logprobs(self, ask: Ask, *, trace: str = "") -> tuple[TokenLogprob | None, ...]: ...


@dataclass(frozen=True)
class Brought:
    """What one read brought for those who listen."""

    pieces: tuple[tuple[int, Piece], ...]
    """By choice."""
    usage: Usage | None


class Listener(Protocol):
    """The group, as its connections tell it."""

    def opened(self, connection: "Connection") -> None:
        """The server has the request."""
        ...

    def brought(self, connection: "Connection", brought: Brought) -> None:
        """Nothing more is read until `taken` is called."""
        ...

    def failed(self, connection: "Connection", error: Exception) -> None:
        """At most once, and last."""
        ...


class Connection:
    """Owned by its group, which waits for `task`."""

    def __init__(
        self, server: Generating, planned: PlannedAsk, request: GenerateRequest, listener: Listener, *, held: bool
    ) -> None:
        """`held`: it stays open until its first token also if nobody listens."""
        self.begun = False
        """Whether a token, or the end of a child, has come."""
        self._server = server
        self._planned = planned
        self._request = request
        self._listener = listener
        self._held = held
        self._listening = {child: set(indices) for child, indices in enumerate(planned.choices) if indices}
        """By child that has not finished."""
        self._unfinished = set(range(len(planned.choices)))
        self._taken = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def mute(self, indices: Iterable[int]) -> None:
        """These choices get nothing more."""
        for index in indices:
            for child, listening in list(self._listening.items()):
                listening.discard(index)
                if not listening:
                    del self._listening[child]
        self._close_if_unheard()

    def taken(self) -> None:
        """The reader has what was brought last."""
        self._taken.set()

    def close(self) -> None:
        """May be called at any time, twice too."""
        self.task.cancel()

    async def _run(self) -> None:
        try:
            await self._read_all()
        except Exception as error:  # the group hands it to its reader, who raises it
            if self._listening or self._held:  # else it is about what nobody waits for
                self._listener.failed(self, error)

    async def _read_all(self) -> None:
        request = self._request
        answer = await self._server.open(self._planned.ask, trace=request.trace, session_id=request.session_id)
        try:
            self._listener.opened(self)
            while items := await answer.read():
                self._taken.clear()
                if self._hand_over(items):
                    await self._taken.wait()
            if left := sorted(index for listening in self._listening.values() for index in listening):
                raise EngineDiedError(f"{self._server.name} broke off before choices {left} ended")
            if self._held:
                raise EngineDiedError(f"{self._server.name} broke off before the first token")
        finally:
            answer.close()

    def _hand_over(self, items: list[Piece | Usage]) -> bool:
        """Whether there is more to come for somebody who must take this first."""
        pieces: list[tuple[int, Piece]] = []
        usage: Usage | None = None
        for item in items:
            if isinstance(item, Usage):
                usage = item
                continue
            if not item.token_ids and item.finish is None:
                continue
            self.begun = True
            pieces += [(index, item) for index in sorted(self._listening.get(item.index, ()))]
            if item.finish is not None:
                self._unfinished.discard(item.index)
                self._listening.pop(item.index, None)
        if self.begun:
            self._held = False
        self._listener.brought(self, Brought(tuple(pieces), usage))
        self._close_if_unheard()
        return bool(pieces and self._listening)

    def _close_if_unheard(self) -> None:
        if self._unfinished and not self._listening and not self._held:
            self.close()
