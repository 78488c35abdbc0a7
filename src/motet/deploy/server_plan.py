"""The plan of a server or a gateway, made before any process starts, and the configs of its engine processes."""

import json
import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from motet.deploy.discover import FindTokenizer
from motet.deploy.gateway_models import TokenizerRules
from motet.deploy.remote_keeper import HEARTBEAT_S
from motet.deploy.tls.certificates import Certificates, no_certificates
from motet.deploy.worker_list import WorkerList
from motet.errors import ConfigError
from motet.models.adapter_file import CONFIG_FILE
from motet.models.folder import read_object
from motet.models.model_source import public_name, resolve, resolve_tokenizer
from motet.models.progress import Progress
from motet.models.regular_files import read_regular
from motet.models.safetensors_header import MAX_HEADER_BYTES
from motet.sampling_defaults import (
    AUTO,
    FIELD_NAMES,
    GENERATION_CONFIG,
    NO_OVERRIDE,
    NONE,
    DefaultRules,
    Override,
    merged,
    read_defaults,
    read_override,
)
from motet.settings.engine_config import EngineConfig, ModelConfig
from motet.settings.gateway_config import GatewayConfig
from motet.settings.named_adapter import named_adapters
from motet.settings.record import Settings
from motet.settings.server_config import CellConfig, KVEventsConfig, RoutingConfig, ServerConfig
from motet.text.formats import ParserNames
from motet.types import Role

SIDE_CHANNEL_PORTS = {Role.PREFILL: 20000, Role.DECODE: 22000, Role.BOTH: 0}
"""Default side-channel ports by role. Other servers know them; 0, any free port, if no other server connects."""
CLUSTER_KEY_BYTES = 16


@dataclass(frozen=True)
class ServerPlan:
    """The parts of one server."""

    engine: EngineConfig
    """Config of all engines, without the fields that `engine_configs` sets for each engine."""
    server: ServerConfig
    tokenizer_path: Path
    chat_template: str | None
    """Jinja text that replaces the model's own template; None to use the model's own."""
    cell: CellConfig = field(default=CellConfig())
    routing: RoutingConfig = field(default=RoutingConfig())
    kv_events: KVEventsConfig = field(default=KVEventsConfig())
    parsers: ParserNames = field(default=ParserNames())
    certificates: Certificates = field(default_factory=no_certificates)
    worker_id: str = ""
    """Id of the worker, if there is one engine; empty for its role with a number."""
    death_linger_s: float = 2.0
    """Time for which a server that has lost its engines still answers with 503."""
    longest_backoff_s: float = 30.0
    """Maximum time from an engine's death to its next start. The time grows with each death in a row."""

    @property
    def role(self) -> Role:
        """The role of the server as its clients see it."""
        return Role.BOTH if self.cell.prefill + self.cell.decode else self.engine.role


def server_plan(settings: Settings, *, cache: Path, progress: Progress) -> ServerPlan:
    """Finds or downloads the model of the settings. `progress` reports slow stages to people. Raises StartupError."""
    model = settings.model
    server = server_config(settings)
    template, parsers = read_template(model.chat_template), parser_names(settings)
    certificates = Certificates(settings.tls)
    adapter_folders(settings.engine())  # a mistake is reported before a model is downloaded
    folder = resolve(model.model, cache=cache, revision=model.revision, progress=progress)
    tokenizer = resolve_tokenizer(model.tokenizer or str(folder), cache=cache, progress=progress)
    root = public_name(model.model)
    named = settings.engine(model_path=folder, model_name=server.served_model_name, model_root=root)
    other = generation_folder(model)
    engine = replace(
        named,
        tokenizer_path=str(tokenizer),
        adapters=adapter_folders(named),
        generation_path="" if other is None else str(other),
        default_sampling_params=default_sampling_params(model, other or folder),
    )
    return ServerPlan(
        engine,
        server,
        tokenizer,
        template,
        settings.cell,
        settings.routing,
        settings.kv_events,
        parsers,
        certificates=certificates,
    )


@dataclass(frozen=True)
class GatewayPlan:
    """The parts of one gateway."""

    gateway: GatewayConfig
    server: ServerConfig
    """If its `served_model_name` is empty, models have the names that their workers report."""
    tokenizers: TokenizerRules = field(default=TokenizerRules({}))
    defaults: DefaultRules = field(default=DefaultRules())
    """The defaults of sampling fields."""
    find_tokenizer: FindTokenizer | None = None
    """Finds the tokenizer of a model whose workers only report its source; None if this is not allowed."""
    routing: RoutingConfig = field(default=RoutingConfig())
    cell: CellConfig = field(default=CellConfig())
    """The rules for prefill."""
    heartbeat_s: float = HEARTBEAT_S
    """Time between two requests for a worker's report."""
    connects_workers: bool = True
    """True if the gateway connects workers that exchange KV; False if they connect to each other without it."""
    certificates: Certificates = field(default_factory=no_certificates)
    listed: WorkerList | None = None
    """List of workers that join and leave; None for the file in the settings, if there is one."""


def gateway_plan(settings: Settings, *, cache: Path, progress: Progress) -> GatewayPlan:
    """Finds or downloads the tokenizers that the settings name, as `server_plan` does. Raises StartupError."""
    model = settings.model
    named = (text.partition("=") for text in settings.gateway.tokenizer_of)
    other = generation_folder(model)
    replaced = {} if model.generation_config in NONE else None if other is None else read_generation_config(other)
    return GatewayPlan(
        settings.gateway,
        settings.server(served_model_name=model.served_model_name or ""),
        tokenizers=TokenizerRules(
            {name: resolve_tokenizer(folder, cache=cache, progress=progress) for name, _, folder in named},
            others=None
            if model.tokenizer is None
            else resolve_tokenizer(model.tokenizer, cache=cache, progress=progress),
            chat_template=read_template(model.chat_template),
            parsers=parser_names(settings),
        ),
        defaults=DefaultRules(replaced=replaced, override=_override(model)),
        find_tokenizer=partial(resolve_tokenizer, cache=cache),
        routing=settings.routing,
        cell=settings.cell,
        certificates=Certificates(settings.tls),
    )


def generation_folder(model: ModelConfig) -> Path | None:
    """Returns the folder that `--generation-config` names; None if it names none. Raises ConfigError."""
    if model.generation_config in (AUTO, *NONE):
        return None
    folder = Path(model.generation_config).expanduser()
    if not (folder / GENERATION_CONFIG).is_file():
        missing = f"{GENERATION_CONFIG} in this folder" if folder.is_dir() else "such folder"
        why = f"there is no {missing}; give {AUTO}, {NONE[0]} or a folder that has a {GENERATION_CONFIG}"
        raise ConfigError(f"--generation-config {model.generation_config}: {why}")
    return folder


def default_sampling_params(model: ModelConfig, folder: Path) -> dict[str, int | float]:
    """Returns the defaults of sampling fields for the model of a server. `folder` has its `generation_config.json`, if
    there is one. Raises StartupError."""
    has_file = model.generation_config not in NONE and (folder / GENERATION_CONFIG).is_file()
    return merged(read_generation_config(folder, override=_override(model)) if has_file else {}, _override(model))


def read_generation_config(folder: Path, *, override: Override = NO_OVERRIDE) -> dict[str, int | float]:
    """Reads the defaults of sampling fields, without the fields that are overridden. Raises StartupError."""
    file = folder / GENERATION_CONFIG
    values = {name: value for name, value in read_object(file).items() if FIELD_NAMES.get(name) not in override}
    try:
        return read_defaults(values)
    except ConfigError as exc:
        advice = f"--override-generation-config can replace it, and --generation-config {NONE[0]} ignores the file"
        raise ConfigError(f"{file}: {exc.message}; {advice}") from exc


def _override(model: ModelConfig) -> Override:
    given = model.override_generation_config
    return NO_OVERRIDE if given is None else read_override([given])


def engine_configs(plan: ServerPlan, *, cores: int, available_bytes: int | None = None) -> dict[str, EngineConfig]:
    """Returns the config of each engine process, by worker id. The engines of a cell share the cores and the memory,
    listen on free ports, and have a cluster key of their own, so that two cells on one machine never connect."""
    cell = plan.cell
    num_engines = max(plan.engine.num_engines, cell.prefill + cell.decode)
    engine = replace(
        plan.engine,
        available_bytes=available_bytes,
        num_engines=num_engines,
        log_format=plan.server.log_format,
        log_level=plan.server.log_level,
    )
    if cell.prefill + cell.decode == 0:
        port = engine.side_channel_port
        name = "engine" if engine.role is Role.BOTH else engine.role.value
        alone = replace(engine, side_channel_port=SIDE_CHANNEL_PORTS[engine.role] if port is None else port)
        return {plan.worker_id or f"{name}-0": alone}
    shared = replace(
        engine,
        num_threads=engine.num_threads or max(1, cores // (cell.prefill + cell.decode)),
        side_channel_port=0,
        cluster_key=engine.cluster_key or secrets.token_hex(CLUSTER_KEY_BYTES),
    )
    # Without prefill engines there is no KV to fetch, and decode engines also compute prompts.
    decode = Role.DECODE if cell.prefill else Role.BOTH
    named = ((Role.PREFILL, Role.PREFILL, cell.prefill), (Role.DECODE, decode, cell.decode))
    return {f"{name}-{i}": replace(shared, role=role) for name, role, number in named for i in range(number)}


def server_config(settings: Settings) -> ServerConfig:
    """Returns the settings of the HTTP side of a server with engines of its own."""
    return settings.server(served_model_name=settings.model.served_model_name or settings.model.model)


def adapter_folders(engine: EngineConfig) -> tuple[str, ...]:
    """Returns the adapters of a config with absolute folders. Raises ConfigError if a folder has no adapter, or an
    adapter of a higher rank than the config allows."""
    found = []
    for adapter in named_adapters(engine.adapters):
        folder, given = Path(adapter.path).expanduser().absolute(), f"--adapter {adapter.name}={adapter.path}"
        try:
            config = json.loads(read_regular(folder / CONFIG_FILE, max_bytes=MAX_HEADER_BYTES))
            rank = config.get("r", 0)
        except FileNotFoundError as exc:
            why = f"there is no {CONFIG_FILE} in this folder" if folder.is_dir() else "there is no such folder"
            raise ConfigError(f"{given}: {why}") from exc
        except (OSError, ValueError, AttributeError, RecursionError) as exc:
            raise ConfigError(f"{given}: its {CONFIG_FILE} cannot be read: {exc}") from exc
        if isinstance(rank, int) and rank > engine.max_adapter_rank:
            maximum = engine.max_adapter_rank
            raise ConfigError(f"{given}: its rank is {rank}, and --max-adapter-rank is {maximum}")
        found.append(f"{adapter.name}={folder}")
    return tuple(found)


def parser_names(settings: Settings) -> ParserNames:
    """Returns the names of the parsers. Raises ConfigError for an unknown name."""
    return ParserNames(tools=settings.model.tool_parser, reasoning=settings.model.reasoning_parser)


def read_template(file: str | None) -> str | None:
    """Reads a chat template; None without a file. Raises ConfigError."""
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError(f"--chat-template {file}: there is no such file") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--chat-template {file}: cannot be read: {exc}") from exc
