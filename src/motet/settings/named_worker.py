"""Settings that are texts with parts: workers, values for one of them or for a key, and resources of Ray."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from motet.errors import ConfigError
from motet.types import EngineKind, Role

INTEGER = re.compile(r"-?[0-9]{1,18}")
REPLICAS = (Role.PREFILL.value, Role.DECODE.value, "gateway")
"""Kinds of replicas that can have resources."""


@dataclass(frozen=True)
class NamedWorker:
    """A server that should be a worker."""

    url: str
    """Its URL, without a slash or `/v1` at its end."""
    role: Role | None = None
    """The role that it must have; None for the one that it reports."""
    kind: EngineKind | None = None
    """The kind of server; None to find it out."""


def named_workers(texts: Iterable[str]) -> Iterator[NamedWorker]:
    """Reads `URL`, `URL,role`, `URL,kind`, `URL,role,kind` or several with commas between. Raises ConfigError."""
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


def check_workers(texts: Iterable[str]) -> None:
    """Raises ConfigError if a text is no worker, or one is named twice."""
    _check_distinct([worker.url for worker in named_workers(texts)])


def check_urls(texts: Sequence[str]) -> None:
    """Raises ConfigError if a text is no URL of a server, or one is named twice."""
    for url in texts:
        if not is_http_url(url):
            raise ConfigError(f"{url!r} is not a URL such as http://host:8000")
    _check_distinct([url.rstrip("/") for url in texts])


def _check_distinct(urls: list[str]) -> None:
    for i, url in enumerate(urls):
        if url in urls[:i]:
            raise ConfigError(f"{url} is named twice")


def by_url(texts: Iterable[str]) -> dict[str, str]:
    """Reads `URL=WORD`, with the word after the last `=`. Raises ConfigError."""
    found = {}
    for text in texts:
        url, equals, word = text.rpartition("=")
        if not (equals and word and is_http_url(url)):
            raise ConfigError(f"{text!r} is not URL=WORD, such as http://host:8000=prefill")
        found[server_url(url)] = word
    return found


def roles_by_url(texts: Iterable[str]) -> dict[str, Role]:
    """Reads `URL=role`. Raises ConfigError."""
    words = by_url(texts)
    for url, word in words.items():
        if word not in tuple(Role):
            raise ConfigError(f"{url}={word}: a role is one of {', '.join(Role)}")
    return {url: Role(word) for url, word in words.items()}


def numbers_by_key(texts: Iterable[str]) -> dict[str, int]:
    """Reads `KEY=NUMBER`, with the number after the last `=`. Raises ConfigError, which does not show the key."""
    found = {}
    for text in texts:
        key, equals, number = text.rpartition("=")
        if not (equals and key.strip() and INTEGER.fullmatch(number)):
            raise ConfigError("it is not KEY=NUMBER, such as secret=-10")
        found[key] = int(number)
    return found


def resources_by_role(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    """Reads `ROLE=NAME:AMOUNT`: custom resources of Ray. Raises ConfigError."""
    found: dict[str, dict[str, float]] = {}
    for text in texts:
        role, _, resource = text.partition("=")
        name, colon, amount = resource.rpartition(":")
        try:
            wanted = float(amount)
        except ValueError:
            wanted = 0.0
        if role not in REPLICAS or not (colon and name) or not 0 < wanted < math.inf:
            raise ConfigError(
                f"{text!r} is not ROLE=NAME:AMOUNT, such as decode=h100:1; a role is one of {', '.join(REPLICAS)}"
            )
        found.setdefault(role, {})[name] = wanted
    return found


def server_url(written: str) -> str:
    """Returns the URL without a slash or `/v1` at its end. Raises ConfigError unless it is a URL of a server."""
    if not is_http_url(written):
        raise ConfigError(
            f"{written!r} is neither a URL such as http://host:8000 nor a role ({', '.join(Role)}) "
            f"nor a kind ({', '.join(EngineKind)})"
        )
    return written.rstrip("/").removesuffix("/v1").rstrip("/")


def is_http_url(url: str) -> bool:
    """Returns True for http and https with a host and, if there is a port, a valid one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and port != 0
        and url.isprintable()
        and " " not in url
    )
