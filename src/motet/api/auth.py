"""Who may ask: with keys set, everything but the open routes needs one of them."""

import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from motet.api.failure import error_response
from motet.errors import UnauthorizedError

OPEN_ROUTES = frozenset({"/health", "/ready", "/version"})

NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)
WRONG_KEY = "Incorrect API key provided."


class ApiKeys:
    """ASGI middleware. Compares with every key in constant time, so that neither a prefix nor a place shows."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_ROUTES:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not given:
                await error_response(UnauthorizedError(NO_KEY))(scope, receive, send)
                return
            if not self._knows(given.strip().encode("latin-1")):
                await error_response(UnauthorizedError(WRONG_KEY))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, given: bytes) -> bool:
        matches = [secrets.compare_digest(given, key) for key in self._keys]  # all of them: time tells nothing
        return any(matches)
