"""The ways in which a gateway can ask a worker, one for each kind of server."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from motet.config import GatewayConfig
from motet.deploy.discover import Ways
from motet.deploy.tokenizer_files import read_files
from motet.engines.calls import Client
from motet.engines.remote import EngineServer, RemoteEngine
from motet.engines.upstream.client import Timeouts, UpstreamOptions, UpstreamServer
from motet.engines.upstream.report import report_of
from motet.engines.upstream.upstream import TextUpstream
from motet.engines.vllm.engine import VLLMEngine
from motet.engines.vllm.figures import PDFigures
from motet.engines.vllm.server import VLLMServer
from motet.engines.wire import EngineReport
from motet.errors import EngineError, ModelLoadError
from motet.settings.named_worker import NamedWorker, by_url
from motet.text.tokenizer import Tokenizer
from motet.types import EngineKind

SAMPLE = "The naïve café's 2nd menu:\n\t42 kg of 你好, x**2 != 3.14 🙂"
"""Words, numbers, signs and scripts that tokenizers cut differently."""

FindTokenizer = Callable[[str], Path]
"""A folder with a tokenizer, by a folder or a name on the hub. Raises ModelLoadError."""


class MotetWay:
    """A server of ours."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def report(self) -> EngineReport:
        return await self._server.report()

    def kept(self, report: EngineReport) -> RemoteEngine:
        return RemoteEngine(self._server, report)

    async def tokenizer(self) -> dict[str, bytes]:
        return await self._server.tokenizer()

    async def check(self, tokenizer: Tokenizer, model: str) -> None:
        """Whoever names another one for a server of ours wants it so."""


class VLLMWay:
    """A vLLM server. It hands out no tokenizer, but says where its model came from."""

    def __init__(
        self, server: VLLMServer, *, figures: PDFigures, leader_timeout_s: float, find_tokenizer: FindTokenizer | None
    ) -> None:
        self._server = server
        self._figures = figures
        self._leader_timeout_s = leader_timeout_s
        self._find_tokenizer = find_tokenizer

    async def report(self) -> EngineReport:
        return await self._server.report()

    def kept(self, report: EngineReport) -> VLLMEngine:
        return VLLMEngine(self._server, report, figures=self._figures, leader_timeout_s=self._leader_timeout_s)

    async def tokenizer(self) -> dict[str, bytes]:
        find = self._find_tokenizer
        if find is None:
            raise EngineError(f"{self._server.name} hands out none")

        def read() -> dict[str, bytes]:
            try:
                return read_files(find(self._server.root))
            except ModelLoadError as error:
                raise EngineError(f"{self._server.name} loaded it from {self._server.root}: {error.message}") from error

        return await asyncio.to_thread(read)

    async def check(self, tokenizer: Tokenizer, model: str) -> None:
        """Token ids of another vocabulary would be answered all the same, with nonsense."""
        theirs = await self._server.tokenize(SAMPLE, model)
        ours = tokenizer.encode(SAMPLE, add_special_tokens=False)
        if theirs is not None and theirs != ours:
            raise EngineError(
                f"{self._server.name} has another tokenizer for {model} than this gateway: of a sample text it makes "
                f"{len(theirs)} tokens {theirs[:5]}..., and here it is {len(ours)}, {ours[:5]}... "
                f"(name the right one with --tokenizer-of {model}=FOLDER)"
            )


class TextWay:
    """Any server of OpenAI's API."""

    def __init__(self, server: UpstreamServer) -> None:
        self._server = server

    async def report(self) -> EngineReport:
        return await report_of(self._server)

    def kept(self, report: EngineReport) -> TextUpstream:
        return TextUpstream(self._server, report)

    async def tokenizer(self) -> dict[str, bytes]:
        raise EngineError(f"{self._server.name} takes texts: it needs no tokenizer here")

    async def check(self, tokenizer: Tokenizer, model: str) -> None:
        """It is sent none of its tokens."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What all workers of a gateway are asked with."""

    config: GatewayConfig
    client: Client
    pass_keys: bool
    """Whether clients' keys may reach text upstreams: never where they are ours."""
    find_tokenizer: FindTokenizer | None = None


def ways_to_ask(named: NamedWorker, asking: Asking, figures: PDFigures) -> Ways:
    """Of one worker; who has not been found out yet is asked in this order."""
    config, url = asking.config, named.url
    key = by_url(config.key_of).get(url, config.worker_api_key)

    def vllm() -> VLLMWay:
        return VLLMWay(
            VLLMServer(url, asking.client, api_key=key, role=named.role),
            figures=figures,
            leader_timeout_s=config.leader_timeout_s,
            find_tokenizer=asking.find_tokenizer,
        )

    def texts() -> TextWay:
        options = UpstreamOptions(
            api_key=key,
            pass_key=asking.pass_keys,
            timeouts=Timeouts(first_byte_s=config.upstream_timeout_s, idle_s=config.upstream_timeout_s),
        )
        return TextWay(UpstreamServer(url, asking.client, options=options))

    return {
        EngineKind.MOTET: lambda: MotetWay(EngineServer(url, asking.client, api_key=key)),
        EngineKind.VLLM: vllm,
        EngineKind.OPENAI: texts,
    }
