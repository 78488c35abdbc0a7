"""Parsers of settings that name workers: their URLs, roles, kinds and Ray resources."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from motet.engine_info import EngineKind
from motet.errors import ConfigError
from motet.settings.server_url import is_http_url, server_url, without_v1
from motet.types import Role

REPLICAS = (Role.PREFILL.value, Role.DECODE.value, "gateway")
"""Kinds of replicas that can have custom resources."""


@dataclass(frozen=True)
class NamedWorker:
    """A server to use as a worker."""

    url: str
    """URL without a trailing slash or `/v1`."""
    role: Role | None = None
    """Required role; None for the role that the server reports."""
    kind: EngineKind | None = None
    """Kind of server; None to detect it."""


def named_workers(texts: Iterable[str]) -> Iterator[NamedWorker]:
    """Parses texts of one or more `URL`, `URL,role`, `URL,kind` or `URL,role,kind`. Raises ConfigError."""
    named: NamedWorker | None = None
    for part in (part.strip() for text in texts for part in text.split(",")):
        role = Role(part) if part in tuple(Role) else None
        kind = EngineKind(part) if part in tuple(EngineKind) else None
        if role is None and kind is None:
            if named is not None:
                yield named
            if not is_http_url(part):
                raise ConfigError(
                    f"{part!r} is neither a URL such as http://host:8000 nor a role ({', '.join(Role)}) "
                    f"nor a kind ({', '.join(EngineKind)})"
                )
            named = NamedWorker(without_v1(part))
        elif named is None or (role and named.role) or (kind and named.kind):
            raise ConfigError(f"{part} has no URL before it")
        else:
            named = NamedWorker(named.url, role or named.role, kind or named.kind)
    if named is not None:
        yield named


def check_workers(texts: Iterable[str]) -> None:
    """Raises ConfigError if a text is not a worker, or if a worker occurs twice."""
    _check_distinct([worker.url for worker in named_workers(texts)])


def check_urls(texts: Sequence[str]) -> None:
    """Raises ConfigError if a text is not the URL of a server, or if a URL occurs twice."""
    _check_distinct([server_url(url) for url in texts])


def _check_distinct(urls: list[str]) -> None:
    for i, url in enumerate(urls):
        if url in urls[:i]:
            raise ConfigError(f"{url} is named twice")


def by_url(texts: Iterable[str]) -> dict[str, str]:
    """Parses `URL=WORD`, with the word after the last `=`. Raises ConfigError."""
    found = {}
    for text in texts:
        url, equals, word = text.rpartition("=")
        if not (equals and word and is_http_url(url)):
            raise ConfigError(f"{text!r} is not URL=WORD, such as http://host:8000=prefill")
        found[server_url(url)] = word
    return found


def roles_by_url(texts: Iterable[str]) -> dict[str, Role]:
    """Parses `URL=role`. Raises ConfigError."""
    words = by_url(texts)
    for url, word in words.items():
        if word not in tuple(Role):
            raise ConfigError(f"{url}={word}: a role is one of {', '.join(Role)}")
    return {url: Role(word) for url, word in words.items()}


def resources_by_role(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    """Parses `ROLE=NAME:AMOUNT`, custom Ray resources. Raises ConfigError."""
    found: dict[str, dict[str, float]] = {}
    for text in texts:
        role, _, resource = text.partition("=")
        name, colon, amount = resource.rpartition(":")
        try:
            required = float(amount)
        except ValueError:
            required = 0.0
        if role not in REPLICAS or not (colon and name) or not 0 < required < math.inf:
            raise ConfigError(
                f"{text!r} is not ROLE=NAME:AMOUNT, such as decode=h100:1; a role is one of {', '.join(REPLICAS)}"
            )
        found.setdefault(role, {})[name] = required
    return found
