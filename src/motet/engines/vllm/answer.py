"""One answer of a vLLM server as it streams."""

from collections.abc import Awaitable, Callable

import aiohttp

from motet.engines.calls import FAULTS
from motet.engines.vllm.wire import Piece, Reader, Usage
from motet.errors import EngineDiedError, EngineError, MotetError

Verdict = Callable[[MotetError], Awaitable[MotetError]]
"""Finds out whether a failure is that of the request or that of the engine."""


class Answer:
    """Closing it before its end ends the request there."""

    def __init__(self, name: str, response: aiohttp.ClientResponse, reader: Reader, verdict: Verdict) -> None:
        """`name`: of the server, in messages."""
        self._name = name
        self._response = response
        self._reader = reader
        self._verdict = verdict

    async def read(self) -> list[Piece | Usage]:
        """What has come, at least something of it; empty at the end. Raises MotetError, EngineDiedError among them
        when it breaks off."""
        while True:
            try:
                data = await self._response.content.readany()
            except FAULTS as error:
                said = str(error) or type(error).__name__
                raise EngineDiedError(f"{self._name} was lost in mid-answer: {said}") from error
            if not data:
                if not self._reader.done:
                    raise EngineDiedError(f"{self._name} broke off in mid-answer")
                return []
            try:
                items = self._reader.feed(data)
            except EngineError as error:
                if (judged := await self._verdict(error)) is error:
                    raise
                raise judged from error
            if items:
                return items

    def close(self) -> None:
        """May be called at any time, twice too."""
        self._response.close()
