"""How a worker is named: `URL`, and behind it what it must be, if anything: a role, a kind, or both."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from motet.errors import ConfigError
from motet.types import EngineKind, Role


@dataclass(frozen=True)
class NamedWorker:
    """A server that is to be a worker."""

    url: str
    """As it is asked: without a slash or `/v1` at its end."""
    role: Role | None = None
    """What it must be; None: what it says."""
    kind: EngineKind | None = None
    """What it is asked as; None: what it is found to be."""


def named_workers(texts: Iterable[str]) -> Iterator[NamedWorker]:
    """Of `URL`, `URL,role`, `URL,kind`, `URL,role,kind` or several with commas between them.

    Raises ConfigError for what is none."""
    named: NamedWorker | None = None
    for part in (part.strip() for text in texts for part in text.split(",")):
        role = Role(part) if part in tuple(Role) else None
        kind = EngineKind(part) if part in tuple(EngineKind) else None
        if role is None and kind is None:
            if named is not None:
                yield named
            named = NamedWorker(server_url(part))
        elif named is None or (role and named.role) or (kind and named.kind):
            raise ConfigError(f"{part} has no URL before it")
        else:
            named = NamedWorker(named.url, role or named.role, kind or named.kind)
    if named is not None:
        yield named


def by_url(texts: Iterable[str]) -> dict[str, str]:
    """Of `URL=WORD` each; what stands behind the last `=` is the word. Raises ConfigError for what is none."""
    found = {}
    for text in texts:
        url, equals, word = text.rpartition("=")
        if not (equals and word and is_http_url(url)):
            raise ConfigError(f"{text!r} is not URL=WORD, such as http://host:8000=prefill")
        found[server_url(url)] = word
    return found


def roles_by_url(texts: Iterable[str]) -> dict[str, Role]:
    """Of `URL=role` each. Raises ConfigError."""
    words = by_url(texts)
    for url, word in words.items():
        if word not in tuple(Role):
            raise ConfigError(f"{url}={word}: a role is one of {', '.join(Role)}")
    return {url: Role(word) for url, word in words.items()}


def server_url(written: str) -> str:
    """Raises ConfigError unless it is a URL of a server."""
    if not is_http_url(written):
        raise ConfigError(
            f"{written!r} is neither a URL such as http://host:8000 nor a role ({', '.join(Role)}) "
            f"nor a kind ({', '.join(EngineKind)})"
        )
    return written.rstrip("/").removesuffix("/v1").rstrip("/")


def is_http_url(url: str) -> bool:
    """With a host, and a port that can be one if there is any."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and url.split() == [url]
