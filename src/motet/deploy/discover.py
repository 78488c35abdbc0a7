"""Finds out what kind of server a worker is, by asking it in each way until it answers in one.

    GET /engine answers             a server of ours
    token ids in, token ids out     vLLM
    GET /v1/models answers          any server of OpenAI's API: text in, text out

A server of ours that refuses (another version, another key) is not asked further: it would do as a text upstream, and
nobody would notice. What a server was found to be is kept until it answers as something else; one of texts that was
gone is found out anew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from motet.deploy.remote_keeper import Kept
from motet.engines.base import Engine
from motet.engines.upstream.upstream import TextUpstream
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, OtherServerError
from motet.text.tokenizer import Tokenizer
from motet.types import EngineKind


class KeptEngine(Engine, Kept, Protocol):
    """Of a worker that takes tokens."""


class Way(Protocol):
    """A worker, asked as one kind of server."""

    async def report(self) -> EngineReport:
        """Raises OtherServerError if it is of another kind, EngineSilentError or EngineDiedError if it is not to be
        reached, another EngineError if there is no understanding."""
        ...

    def kept(self, report: EngineReport) -> KeptEngine | TextUpstream:
        """What we have dealings with, of the start that reports so."""
        ...

    async def tokenizer(self) -> dict[str, bytes]:
        """The files of its own, once it has reported. Raises EngineError if it hands out none."""
        ...

    async def check(self, tokenizer: Tokenizer, model: str) -> None:
        """Raises EngineError if it is seen to have another one for this model."""
        ...


Ways = Mapping[EngineKind, Callable[[], Way]]
"""In the order in which they are tried."""


@dataclass(frozen=True)
class _Found:
    kind: EngineKind
    server: Way


class FoundServer:
    """A `Way` of whatever kind it turns out to be. `kind`: what it was named as; None: to be found out."""

    def __init__(self, url: str, ways: Ways, kind: EngineKind | None = None) -> None:
        self.url = url
        self._ways = ways if kind is None else {kind: ways[kind]}
        self._found: _Found | None = None

    async def report(self) -> EngineReport:
        if self._found is not None:
            try:
                return await self._found.server.report()
            except OtherServerError:
                self._found = None  # somebody else listens there now
            except EngineSilentError:
                raise
            except EngineDiedError:
                if self._found.kind is EngineKind.OPENAI:
                    self._found = (
                        None  # nearly every kind of server answers as one of texts, so it may be back as another
                    )
                raise
        return await self._find()

    def kept(self, report: EngineReport) -> KeptEngine | TextUpstream:
        return self._way.kept(report)

    async def tokenizer(self) -> dict[str, bytes]:
        return await self._way.tokenizer()

    async def check(self, tokenizer: Tokenizer, model: str) -> None:
        await self._way.check(tokenizer, model)

    @property
    def _way(self) -> Way:
        assert self._found is not None  # it has reported
        return self._found.server

    async def _find(self) -> EngineReport:
        failures: list[str] = []
        for kind, make in self._ways.items():
            server = make()
            try:
                report = await server.report()
            except OtherServerError as error:
                failures.append(f"as {kind}: {error.message}")
            except EngineDiedError:
                raise
            except EngineError as error:
                raise self._no_understanding([*failures, f"as {kind}: {error.message}"]) from error
            else:
                self._found = _Found(kind, server)
                return report
        raise self._no_understanding(failures)

    def _no_understanding(self, failures: Sequence[str]) -> EngineError:
        if len(failures) == 1:
            return EngineError(failures[0].partition(": ")[2])
        return EngineError(f"{self.url} is no server that can be a worker; asked {'; '.join(failures)}")
