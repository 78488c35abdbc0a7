"""A `motet serve` server as a gateway asks it, in the protocol of `engines.wire`.

Faults of the connection are as in `calls`, refusals as in `refusal`; another protocol, or nonsense, is an EngineError.
"""

from typing import TypeVar

import aiohttp
import msgspec

from motet.engines.calls import QUESTION_TIMEOUT_S, REPORT_TIMEOUT_S, Calls, header_text
from motet.engines.remote.refusal import refused
from motet.engines.wire import MSGPACK, PROTOCOL, PROTOCOL_HEADER, TOKENIZER_FILES, UNREADABLE, EngineReport
from motet.errors import EngineError, MotetError, OtherServerError

T = TypeVar("T")

KEY_HINT = "Give the gateway a key that the worker knows."


class _Spoken(msgspec.Struct):
    """What every version says of itself."""

    protocol: int
    version: str = "unknown"


class EngineServer:
    """One server. The client belongs to who made it."""

    def __init__(self, url: str, client: aiohttp.ClientSession, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = f"the worker {self.url}"
        headers = {PROTOCOL_HEADER: str(PROTOCOL), "content-type": MSGPACK}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._calls = Calls(
            self.url,
            client,
            name=self.name,
            headers=headers,
            refused=lambda refusal: refused(refusal, self.name, key_hint=KEY_HINT),
        )

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> EngineReport:
        """How it is. EngineError if it speaks another protocol, OtherServerError if it is no server of ours."""
        body = await self.ask("GET", "/engine", timeout_s=timeout_s)
        try:
            spoken = self.decode(body, _Spoken)
            if spoken.protocol == PROTOCOL:
                return self.decode(body, EngineReport)
        except EngineError as error:
            raise OtherServerError(error.message) from error
        raise EngineError(
            f"{self.name} (Motet {spoken.version}) speaks engine protocol {spoken.protocol}, and this server "
            f"{PROTOCOL}: run the same version of Motet on both"
        )

    async def tokenizer(self) -> dict[str, bytes]:
        """Name of each file -> its content. Put into a folder, they are what `Tokenizer.load` reads."""
        files = self.decode(await self.ask("GET", "/engine/tokenizer", timeout_s=None), dict[str, bytes])
        return {name: content for name, content in files.items() if name in TOKENIZER_FILES}

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        trace: str = "",
        timeout_s: float | None = QUESTION_TIMEOUT_S,
    ) -> bytes:
        """The whole body of an answer."""
        return await self._calls.ask(method, path, body, headers=_traced(trace), timeout_s=timeout_s)

    async def open(self, path: str, body: bytes, *, trace: str) -> aiohttp.ClientResponse:
        """An answer that lasts; whoever gets it closes it."""
        return await self._calls.open(path, body, headers=_traced(trace))

    def decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UNREADABLE as error:
            raise EngineError(f"{self.name} answered what this server cannot read: {error}") from error

    def fault(self, error: Exception) -> MotetError:
        """What is wrong with a connection, in our words."""
        return self._calls.fault(error)


def _traced(trace: str) -> dict[str, str]:
    return {"x-request-id": value} if (value := header_text(trace)) else {}
