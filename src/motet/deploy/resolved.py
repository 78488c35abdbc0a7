"""The plan of a server from its settings: finds, or fetches, the model that they name."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from motet.config import ServerConfig
from motet.deploy.plan import ServerPlan
from motet.errors import ConfigError
from motet.models import resolve, resolve_tokenizer
from motet.settings import Settings
from motet.text.formats import ParserNames


def server_plan(settings: Settings, *, cache: Path, say: Callable[[str], None]) -> ServerPlan:
    """`say`: is told of what takes long. Raises StartupError."""
    model = settings.model
    server = server_config(settings)
    template, parsers = read_template(model.chat_template), parser_names(settings)
    source = resolve(model.model, cache=cache, revision=model.revision, say=say)
    tokenizer = resolve_tokenizer(model.tokenizer or str(source.path), cache=cache, say=say)
    named = settings.engine(model_path=source.path, model_name=server.served_model_name)
    engine = msgspec.structs.replace(named, tokenizer_path=str(tokenizer))
    return ServerPlan(engine, server, tokenizer, template, settings.cell, settings.routing, settings.kv_events, parsers)


def server_config(settings: Settings) -> ServerConfig:
    """Of a server with one model of its own."""
    return settings.server(served_model_name=settings.model.served_model_name or settings.model.model)


def parser_names(settings: Settings) -> ParserNames:
    """Raises ConfigError for a name that nobody knows."""
    return ParserNames(tools=settings.model.tool_parser, reasoning=settings.model.reasoning_parser)


def read_template(file: str | None) -> str | None:
    """Raises ConfigError."""
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError(f"--chat-template {file}: there is no such file") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--chat-template {file}: cannot be read: {exc}") from exc
