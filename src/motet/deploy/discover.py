"""Detects the kind of a worker's server, and checks that the worker fits the other workers.

    GET /engine answers             a Motet server
    token ids in, token ids out     vLLM
    GET /v1/models answers          any server with OpenAI's API: text in, text out

A Motet server that refuses the request (another version, another key) is not tried as another kind: it would silently
work as a text upstream. The detected kind is kept until the server answers as another kind. A text upstream that was
unavailable is probed again."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from motet.engine_info import EngineKind
from motet.engines.http import Client
from motet.engines.remote import EngineServer, RemoteEngine
from motet.engines.upstream.text_upstream import TextUpstream
from motet.engines.upstream.upstream_server import UpstreamOptions, UpstreamServer
from motet.engines.vllm.vllm_engine import VLLMEngine
from motet.engines.vllm.vllm_server import VLLMServer
from motet.engines.wire import TOKENIZER_FILES, EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, ModelLoadError, OtherServerError
from motet.ids import ModelName
from motet.metrics.routing import TicketLog
from motet.routing.workers.worker_facts import numeric_format
from motet.settings.gateway_config import GatewayConfig
from motet.settings.named_worker import NamedWorker, by_url
from motet.text.tokenizer import Tokenizer
from motet.types import Role

SAMPLE = "The naïve café's 2nd menu:\n\t42 kg of 你好, x**2 != 3.14 🙂"
"""Words, numbers, symbols and scripts, which different tokenizers split in different ways."""

FindTokenizer = Callable[[str], Path]
"""Returns the folder of a tokenizer, for a folder or a name on the hub. Raises ModelLoadError."""


@dataclass(frozen=True)
class WorkerProbe:
    """Functions that query a worker's server as one kind of server."""

    report: Callable[[], Awaitable[EngineReport]]
    """Requests a report. Raises OtherServerError if the server is of another kind, EngineSilentError or EngineDiedError
    if it cannot be reached, and another EngineError if its answer is invalid."""
    make_engine: Callable[[EngineReport], RemoteEngine | VLLMEngine | TextUpstream]
    """Makes the engine of the server that sent this report. A server that was restarted needs another one."""
    tokenizer: Callable[[], Awaitable[dict[str, bytes]]] | None = None
    """Fetches the tokenizer's files; needs a report first. None for a text upstream. Raises EngineError."""
    check_tokenizer: Callable[[Tokenizer, str], Awaitable[None]] | None = None
    """Raises EngineError if the server has another tokenizer for the model. None for Motet servers, for which the
    operator may give the gateway another tokenizer on purpose."""


Probes = Mapping[EngineKind, Callable[[], WorkerProbe]]
"""Functions that make the `WorkerProbe` of each kind, in the order in which the kinds are tried."""


class FoundServer:
    """A worker's server. Its kind is detected by the first report, unless the operator named it."""

    def __init__(self, url: str, probes: Probes, *, kind: EngineKind | None = None, id: str = "") -> None:
        """`kind`: the kind that the operator named; None to detect it. `id`: the worker's id, for messages."""
        self.url = url
        self._id = id or url
        self._probes = probes if kind is None else {kind: probes[kind]}
        self._found: tuple[EngineKind, WorkerProbe] | None = None

    @property
    def probe(self) -> WorkerProbe:
        assert self._found is not None  # it has reported
        return self._found[1]

    async def report(self) -> EngineReport:
        """Requests a report. Raises the errors of `WorkerProbe.report`, with the failure of each kind if none fits."""
        if self._found is not None:
            kind, probe = self._found
            try:
                return await probe.report()
            except OtherServerError:
                self._found = None  # another server listens there now
            except EngineDiedError as error:
                # Nearly every server passes as a text upstream. The next server at this URL can be of another kind.
                if kind is EngineKind.OPENAI and not isinstance(error, EngineSilentError):
                    self._found = None
                raise
        return await self._find()

    async def _find(self) -> EngineReport:
        failures: dict[EngineKind, str] = {}
        for kind, make in self._probes.items():
            probe = make()
            try:
                report = await probe.report()
            except EngineDiedError:
                raise
            except EngineError as error:
                failures[kind] = error.message
                if not isinstance(error, OtherServerError):
                    break
            else:
                self._found = kind, probe
                return report
        if len(failures) == 1:
            raise EngineError(*failures.values())
        by_kind = "; ".join(f"as {kind}: {message}" for kind, message in failures.items())
        raise EngineError(f"{self._id} cannot be a worker; tried {by_kind}")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The settings with which a gateway queries all its workers."""

    config: GatewayConfig
    client: Client
    pass_keys: bool = False
    """True if clients' keys may be passed on to text upstreams; must be False if they are keys of this server."""
    find_tokenizer: FindTokenizer | None = None
    tickets: TicketLog = field(default_factory=TicketLog)
    worker_key: str = ""
    """Sent to Motet servers that have no key of their own."""

    def server(self, named: NamedWorker, id: str) -> FoundServer:
        """Returns the server of the worker `id`, without sending it a request."""
        config, url, client = self.config, named.url, self.client
        own_key = by_url(config.key_of).get(url)
        key = own_key or config.worker_api_key

        def motet() -> WorkerProbe:
            server = EngineServer(url, client, worker_key=own_key or self.worker_key, id=id)
            report = server.report if named.kind else partial(_motet_report, server, EngineServer(url, client, id=id))
            return WorkerProbe(report, partial(RemoteEngine, server), server.tokenizer)

        def vllm() -> WorkerProbe:
            server = VLLMServer(url, client, api_key=key, role=named.role, id=id)
            make = partial(VLLMEngine, server, tickets=self.tickets, leader_timeout_s=config.leader_timeout_s)
            files = partial(asyncio.to_thread, _vllm_files, server, self.find_tokenizer)
            return WorkerProbe(server.report, make, files, partial(_check_vllm_tokenizer, server=server))

        def texts() -> WorkerProbe:
            options = UpstreamOptions(api_key=key, pass_key=self.pass_keys, timeout_s=config.upstream_timeout_s)
            server = UpstreamServer(url, client, options=options, id=id)
            return WorkerProbe(server.report, partial(TextUpstream, server))

        probes: Probes = {EngineKind.MOTET: motet, EngineKind.VLLM: vllm, EngineKind.OPENAI: texts}
        return FoundServer(url, probes, kind=named.kind, id=id)


async def _motet_report(server: EngineServer, keyless: EngineServer) -> EngineReport:
    """Returns the report of a server whose kind the operator has not named. The first request goes to `keyless`, the
    same server without a key, so that only a Motet server receives the key."""
    if not server.has_reported:
        try:
            await keyless.report()
        except (EngineDiedError, EngineSilentError, OtherServerError):
            raise
        except EngineError:
            pass  # it requires a key; any other error is raised again by the next request
    return await server.report()


def _vllm_files(server: VLLMServer, find_tokenizer: FindTokenizer | None) -> dict[str, bytes]:
    """Reads the tokenizer of a vLLM server, which sends no files, but reports the folder or hub name of its model."""
    if find_tokenizer is None:
        raise EngineError(f"{server.name} does not send one")
    try:
        return read_files(find_tokenizer(server.root))
    except ModelLoadError as error:
        raise EngineError(f"{server.name} loaded it from {server.root}: {error.message}") from error


async def _check_vllm_tokenizer(tokenizer: Tokenizer, model: str, *, server: VLLMServer) -> None:
    """Compares token ids. With another vocabulary, the server would return meaningless text without an error."""
    remote = await server.tokenize(SAMPLE, model)
    local = tokenizer.encode(SAMPLE, add_special_tokens=False)
    if remote is not None and remote != local:
        raise EngineError(
            f"{server.name} has another tokenizer for {model} than this gateway: it turns a sample text into "
            f"{len(remote)} tokens {remote[:5]}..., this gateway into {len(local)}, {local[:5]}... "
            f"(name the right one with --tokenizer-of {model}=FOLDER)"
        )


class CompatibilityCheck:
    """Decides if a worker fits the others: a group that moves to another worker must find the same model there.

    Workers can have different models, but workers with the same model name must agree on each fact that they report.
    The value that was reported first counts, until all workers that reported it have left."""

    def __init__(self) -> None:
        self._models: dict[ModelName, dict[tuple[str, EngineKind | None], tuple[object, set[str]]]] = {}
        """Value of each fact, and ids of the workers that reported it, by model and then by (fact, engine kind). A fact
        with an engine kind is compared only among engines of this kind."""

    def problem(self, id: str, report: EngineReport, *, role: Role | None) -> str | None:
        """Returns the reason why the worker `id` cannot be used; None if it can. `role`: as named by the operator."""
        self.forget(id)
        info = report.info
        if role is not None and info.role is not role:
            return f"it was named with role {role}, but its role is {info.role}"
        facts: dict[tuple[str, EngineKind | None], object] = {("computes in", info.kind): numeric_format(info)}
        if info.eos_token_ids:
            facts["ends answers with the tokens", None] = info.eos_token_ids
        known = self._models.setdefault(info.model, {})
        for fact, here in facts.items():
            if fact in known and (other := known[fact][0]) != here:
                return f"it {fact[0]} {here}, and other workers of {info.model} {other}"
        for fact, here in facts.items():
            known.setdefault(fact, (here, set()))[1].add(id)
        return None

    def forget(self, id: str) -> None:
        """Removes the facts that a worker has reported. Must be called when the worker has left."""
        for known in self._models.values():
            for fact, (_, ids) in list(known.items()):
                ids.discard(id)
                if not ids:
                    del known[fact]


def read_files(folder: Path) -> dict[str, bytes]:
    """Reads the files of a tokenizer from a model's folder, for a gateway."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def load_files(files: Mapping[str, bytes], *, chat_template: str | None) -> Tokenizer:
    """Makes a tokenizer from another server's files, through a temporary folder: the libraries only read folders."""
    with TemporaryDirectory(prefix="motet-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return Tokenizer.load(Path(folder), chat_template=chat_template)
