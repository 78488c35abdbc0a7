"""Who may ask: with keys set, all but the open routes need one of them, and operators' routes the operators' key."""

import secrets
from collections.abc import Sequence

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from motet.api.failure import error_response
from motet.api.key_limits import ANONYMOUS
from motet.errors import UnauthorizedError

OPEN_ROUTES = frozenset({"/health", "/ready", "/version"})

NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)
WRONG_KEY = "Incorrect API key provided."
NO_ADMIN_KEY = "This route needs the server's admin key in an Authorization header (Authorization: Bearer ADMIN_KEY)."


class ApiKeys:
    """ASGI middleware. Compares with every key in constant time, so that neither a prefix nor a place shows.

    `admin_key`: what operators' routes need in place of an API key; empty: they are like the others."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_key: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._admin_keys = [admin_key.encode()] if admin_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except UnauthorizedError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Notes which key it was."""
        path = scope["path"]
        admin = bool(self._admin_keys) and is_admin_route(path)
        keys = self._admin_keys if admin else self._keys
        if not keys or path in OPEN_ROUTES:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise UnauthorizedError(NO_ADMIN_KEY if admin else NO_KEY)
        place = _place(given.strip().encode("latin-1"), keys)
        if place is None:
            raise UnauthorizedError(NO_ADMIN_KEY if admin else WRONG_KEY)
        scope["state"]["client"] = "admin" if admin else f"key-{place}"


def is_admin_route(path: str) -> bool:
    return path in ("/drain", "/workers") or path.startswith("/workers/")


def client_of(request: Request) -> str:
    """Which key the request came with, by its place among the server's; the key itself goes no further."""
    client: str = getattr(request.state, "client", ANONYMOUS)
    return client


def _place(given: bytes, keys: Sequence[bytes]) -> int | None:
    matches = [secrets.compare_digest(given, key) for key in keys]  # all of them: time tells nothing
    return matches.index(True) if any(matches) else None
