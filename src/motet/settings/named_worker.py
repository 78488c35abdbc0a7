"""How a worker is named: `URL`, or `URL,role` for one that must have that role."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from motet.errors import ConfigError
from motet.types import Role


@dataclass(frozen=True)
class NamedWorker:
    """A server that is to be a worker."""

    url: str
    """As it is asked: without a slash or `/v1` at its end."""
    role: Role | None = None
    """What it must be; None: what it says."""


def named_workers(texts: Iterable[str]) -> Iterator[NamedWorker]:
    """Of `URL`, `URL,role` or several with commas between them. Raises ConfigError for what is none."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    roles = [*(Role(part) if part in tuple(Role) else None for part in parts), None]
    if parts and roles[0] is not None:
        raise ConfigError(f"{parts[0]} has no URL before it")
    for place, part in enumerate(parts):
        if roles[place] is None:
            yield NamedWorker(server_url(part), roles[place + 1])
        elif roles[place - 1] is not None:
            raise ConfigError(f"{part} has no URL before it")


def server_url(written: str) -> str:
    """Raises ConfigError unless it is a URL of a server."""
    if not is_http_url(written):
        raise ConfigError(f"{written!r} is neither a URL such as http://host:8000 nor a role ({', '.join(Role)})")
    return written.rstrip("/").removesuffix("/v1").rstrip("/")


def is_http_url(url: str) -> bool:
    """With a host, and a port that can be one if there is any."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and url.split() == [url]
