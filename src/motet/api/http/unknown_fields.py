"""Fields of a body that its schema does not have: refused with a 400, or ignored and reported (`--unknown-fields`).

Ignored fields are named in a header of the response, and once for each client in the log. Both are bounded, since a
client can send any number of fields with names of any length."""

import json
import logging
from functools import cache
from typing import get_args
from urllib.parse import quote

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.http.admission import ANONYMOUS
from motet.api.http.schema import Schema
from motet.log import cut

log = logging.getLogger("motet.api")

IGNORED_HEADER = "x-motet-ignored-fields"
MAX_NAMES, MAX_NAME_CHARS = 20, 64
"""Limits on the names of one request."""
MAX_HEADER_CHARS = 1000
MAX_LOGGED = 100
"""Maximum number of names that are logged for one client. Their number is bounded by the number of API keys."""


class IgnoredFields:
    """The fields of one request that are ignored and reported."""

    def __init__(self, *, unknown: bool) -> None:
        """`unknown`: True to ignore unknown fields of the body; False to leave them to its schema, which refuses
        them."""
        self.unknown = unknown
        self.names: list[str] = []
        self.num_more = 0
        """Number of ignored fields that are not in `names`."""

    def remove_from(self, value: object, schema: type[Schema]) -> None:
        """Removes ignored fields from the JSON of a body."""
        if not isinstance(value, dict):
            return
        if self.unknown:
            self._add(remove_unknown(value, schema))
        for name, inner in schema.lenient.items():
            if isinstance(member := value.get(name), dict):
                self._add([f"{name}.{ignored}" for ignored in remove_unknown(member, inner)])
                self._add([f"{name}.{ignored}" for ignored in unknown_entries(member, inner)])

    def _add(self, names: list[str]) -> None:
        listed = names[: MAX_NAMES - len(self.names)]
        self.names += [cut(name, MAX_NAME_CHARS) for name in listed]
        self.num_more += len(names) - len(listed)

    @property
    def header(self) -> str:
        """The names, separated by commas. Other characters than ASCII letters, digits and `_.-` are percent-encoded."""
        shown: list[str] = []
        size = 0
        for name in self.names:
            encoded = quote(name, safe="", errors="replace")
            size += len(encoded) + 2
            if size > MAX_HEADER_CHARS:
                break
            shown.append(encoded)
        return ", ".join([*shown, "..."] if self.num_more or len(shown) < len(self.names) else shown)


def remove_unknown(value: dict[str, object], schema: type[Schema]) -> list[str]:
    """Removes the members that the schema does not know. Returns the names of the members that are not null."""
    known = known_names(schema)
    return [name for name in [*value] if name not in known and value.pop(name) is not None]


def unknown_entries(value: dict[str, object], schema: type[Schema]) -> list[str]:
    """Returns the entries without effect of a schema's lists of names, such as `annotations.x`."""
    lists = ((field, known, value.get(field)) for field, known in schema.known_entries.items())
    return [
        f"{field}.{entry}"
        for field, known, entries in lists
        if isinstance(entries, list)
        for entry in entries
        if isinstance(entry, str) and entry not in known
    ]


@cache
def known_names(schema: type[Schema]) -> frozenset[str]:
    """Returns the names that a schema reads, ignores, or refuses in its own words."""
    names = {field.alias or name for name, field in schema.model_fields.items()}
    return frozenset(
        names | schema.aliases.keys() | schema.ignored | schema.neutral.keys() | schema.refused | schema.former
    )


def ignored_fields(request: Request) -> IgnoredFields:
    """Returns the object that collects the ignored fields of a request."""
    found: IgnoredFields = request.scope["state"].setdefault("ignored_fields", IgnoredFields(unknown=False))
    return found


def without_ignored(request: Request, raw: bytes, *, annotation: object) -> Request:
    """Returns a request whose body lacks ignored fields, for a framework that reads it. `annotation`: the type of the
    body, a schema or a union with one."""
    schemas = [
        kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Schema)
    ]
    ignored = ignored_fields(request)
    if not schemas or not (ignored.unknown or schemas[0].lenient):
        return request
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):  # the framework refuses it
        return request
    ignored.remove_from(value, schemas[0])
    if not ignored.names:
        return request
    body = json.dumps(value).encode()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)


class UnknownFields:
    """ASGI middleware that names the ignored fields of each request, in the response and in the log."""

    def __init__(self, app: ASGIApp, *, ignore: bool) -> None:
        """`ignore`: True to ignore unknown fields of bodies."""
        self._app = app
        self._ignore = ignore
        self._logged: dict[str, set[str]] = {}
        """Names that have been logged, by client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ignored = scope["state"]["ignored_fields"] = IgnoredFields(unknown=self._ignore)

        async def send_with_names(message: Message) -> None:
            if message["type"] == "http.response.start" and ignored.names:
                MutableHeaders(scope=message)[IGNORED_HEADER] = ignored.header
                self._log(ignored, scope)
            await send(message)

        await self._app(scope, receive, send_with_names)

    def _log(self, ignored: IgnoredFields, scope: Scope) -> None:
        logged = self._logged.setdefault(scope["state"].get("client", ANONYMOUS), set())
        new = [name for name in ignored.names if name not in logged][: MAX_LOGGED - len(logged)]
        if not new:
            return
        logged.update(new)
        fields = {"request_id": scope["state"]["trace"], "route": cut(scope["path"], MAX_NAME_CHARS)}
        log.warning("unknown fields are ignored", extra={"fields": fields | {"ignored": ", ".join(new)}})
        if len(logged) == MAX_LOGGED:
            log.warning("more unknown fields of this client are ignored, without a line of their own")
