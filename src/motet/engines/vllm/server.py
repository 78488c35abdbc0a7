"""A vLLM server as a gateway asks it: how it is, and what it generates."""

import aiohttp

from motet.engines.vllm.ask import Ask, Dialect
from motet.engines.vllm.tickets import KVParams
from motet.engines.vllm.wire import Piece, Usage
from motet.engines.wire import EngineReport
from motet.errors import MotetError
from motet.types import Role, TokenLogprob


class Answer:
    """An answer that streams. Closing it ends the request there."""

    async def read(self) -> list[Piece | Usage]:
        """What has come, at least something of it; empty at the end. Raises MotetError, EngineDiedError among them
        when it breaks off."""
        raise NotImplementedError

    def close(self) -> None:
        """May be called at any time, twice too."""
        raise NotImplementedError


class VLLMServer:
    """One server. The client (`motet.engines.remote.engine_client`) belongs to who made it."""

    def __init__(
        self, url: str, client: aiohttp.ClientSession, *, api_key: str | None = None, role: Role | None = None
    ) -> None:
        self.url = url
        self.name = f"the vLLM server {self.url}"

    @property
    def dialect(self) -> Dialect:
        """Known after the first `report`."""
        raise NotImplementedError

    async def report(self) -> EngineReport:
        """How it is. Raises EngineSilentError, EngineDiedError, or another EngineError if it can not be used."""
        raise NotImplementedError

    async def open(self, ask: Ask, *, trace: str = "", session_id: str = "") -> Answer:
        """Returns when the server has taken the request. Raises MotetError."""
        raise NotImplementedError

    async def prefill(self, ask: Ask, *, trace: str = "", session_id: str = "") -> list[KVParams]:
        """Computes the KV of the prompt; one object for each request that may fetch it. Cancelling it closes the
        connection, which ends it there."""
        raise NotImplementedError

    async def prompt_logprobs(self, ask: Ask, *, trace: str = "") -> tuple[TokenLogprob | None, ...]:
        """`ask.sampling.prompt_logprobs` of each token of the prompt; None for the first."""
        raise NotImplementedError

    async def reject(self, params: object, model: str) -> bool:
        """Frees what a ticket holds on the server that made it: this one, which could use it, is sent a request with it
        that it must refuse. Whether it did as hoped."""
        raise NotImplementedError

    def fault(self, error: Exception) -> MotetError:
        """What is wrong with a connection, in our words."""
        raise NotImplementedError
