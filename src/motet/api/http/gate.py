"""Access control: `Gate`, the middleware that every request passes before its body is read.

    routes                        opened by                              if the server has no such key
    OPEN_ROUTES, the page's files no key
    /engine                       the worker key, and no other           local callers
    ADMIN_ROUTES                  the admin key, and no other            local callers; with API keys, no caller
    /workers, other than GET      the same                               the same
    GET /workers                  the admin key, else an API key         local callers
    all others                    an API key                             all callers

OPTIONS needs no key: browsers send none with a preflight request, and no route answers one.

A caller is local if the other end of its socket is this machine, unless a header shows that it forwards a request: a
proxy for a client on another machine (`FORWARDING`), or a browser for a web page (`Origin`, `Sec-Fetch-Site`).

A web page of any site can post to every server that the user's browser can reach, with a few content types and without
a preflight request. So a page must post JSON, for which browsers send a preflight request. The host name of a page's
site can also resolve to this machine (DNS rebinding). So a server on a loopback address accepts only the host names of
loopback, its own, and `--allowed-host`."""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from motet.api.http.body import JSON_TYPE
from motet.api.http.dialect import is_below, route_of
from motet.api.http.failure import ErrorResponse
from motet.engines.wire import WORKER_KEY_CODE
from motet.errors import ForbiddenError, RequestError, UnauthorizedError
from motet.settings.server_config import ServerConfig
from motet.transfer.ticket import is_loopback

OPEN_ROUTES = frozenset(
    {"/health", "/health_generate", "/ping", "/live", "/liveness", "/ready", "/health/ready", "/version"}
)
ADMIN_ROUTES = (
    *("/drain", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    # for trainers
    *("/pause", "/resume", "/is_paused", "/abort_requests", "/weight_info", "/weight_checker"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/sleep", "/wake_up", "/wakeup", "/is_sleeping", "/reset_prefix_cache", "/clear_kv_blocks"),
    *("/server_info", "/get_world_size"),
    # SGLang's names
    *("/pause_generation", "/continue_generation", "/abort_request", "/update_weights_from_disk", "/flush_cache"),
    *("/get_weight_version", "/get_model_info", "/model_info", "/v1/loads"),
)
"""Routes that an API key never opens, since they affect all clients."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
FORWARDING = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
"""Headers of proxies. A client that sends one is not a local caller."""
KEY_HEADER = "x-api-key"
"""The header in which Anthropic's clients send their key; `Authorization` takes precedence."""
CLIENT = "key"
"""Start of the names of clients with an API key."""
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
FROM_NO_OTHER_SITE = ("", "none", "same-origin")

NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY), or in the header x-api-key."
)
WRONG_KEY = "Incorrect API key provided."
NO_ADMIN_KEY = "This route needs the server's admin key in an Authorization header (Authorization: Bearer ADMIN_KEY)."
CLOSED = (
    "This route is closed, since it affects all clients and this server has no admin key. Start the server with "
    "--admin-key, and send that key in an Authorization header (Authorization: Bearer ADMIN_KEY)."
)
WRONG_ADMIN_KEY = "Incorrect admin key provided."
NO_WORKER_KEY = (
    "/engine is for Motet servers, and needs this server's worker key in an Authorization header: start both with the "
    "same --worker-key."
)
ONLY_LOCAL_WORKERS = (
    "Without a worker key, /engine is open to callers on this machine only, not through a proxy and not from a web "
    "page. Start this server and its gateways with the same --worker-key."
)
ONLY_LOCAL_ADMINS = (
    "Without a key, this route is open to callers on this machine only, not through a proxy and not from a web page. "
    "Start the server with --admin-key, and send that key."
)
NOT_JSON = "A request from a web page must have the content type application/json."


@dataclass(frozen=True, kw_only=True)
class KeyCheck:
    """The keys that open some of the routes, and the errors without one."""

    client: str
    """Name of the caller in logs and limits; an API key adds its number."""
    keys: Sequence[bytes]
    missing: str
    wrong: str
    """The errors for a request without a key and with another key."""
    code: str = UnauthorizedError.code or ""
    only_local: str = ""
    """The error for callers that are not local if there are no keys; empty if all callers are allowed then."""

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises UnauthorizedError or ForbiddenError, or stores the client of the key in the scope."""
        if not self.keys:
            if self.only_local and not is_local(scope, headers):
                raise ForbiddenError(self.only_local, code=self.code)
            return
        if not (given := _key_of(headers)):
            raise UnauthorizedError(self.missing, code=self.code)
        # All keys are compared, so that the time does not depend on the key that matches.
        matches = [secrets.compare_digest(given.encode("latin-1"), key) for key in self.keys]
        if not any(matches):
            raise UnauthorizedError(self.wrong, code=self.code)
        scope["state"]["client"] = f"key-{matches.index(True)}" if self.client == CLIENT else self.client


class ClosedRoute:
    """Refuses every caller of an admin route, because the server has API keys and no admin key."""

    def check(self, scope: Scope, headers: Headers) -> None:
        raise ForbiddenError(CLOSED, code="admin_key_required")


class Gate:
    """ASGI middleware that refuses requests without the key of their route."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig, page_routes: Collection[str]) -> None:
        """`page_routes`: the paths of the page's files, which need no key."""
        self._app = app
        self._open_routes = OPEN_ROUTES | frozenset(page_routes)
        key_lists = (config.api_keys, (config.admin_key,), (config.worker_key,))
        api, admin, worker = ([key.encode() for key in keys if key] for keys in key_lists)
        self._clients = KeyCheck(client=CLIENT, keys=api, missing=NO_KEY, wrong=WRONG_KEY)
        self._workers = KeyCheck(
            client="worker",
            keys=worker,
            missing=NO_WORKER_KEY,
            wrong=NO_WORKER_KEY,
            code=WORKER_KEY_CODE,
            only_local=ONLY_LOCAL_WORKERS,
        )
        self._worker_readers = self._clients
        if admin:
            self._worker_readers = KeyCheck(client="admin", keys=admin, missing=NO_ADMIN_KEY, wrong=WRONG_ADMIN_KEY)
        elif not api:
            self._worker_readers = replace(self._clients, only_local=ONLY_LOCAL_ADMINS, code="admin_key_required")
        self._admins = ClosedRoute() if api and not admin else self._worker_readers
        self._hosts = {*LOOPBACK, config.host.lower(), *map(str.lower, config.allowed_hosts)}
        self._any_host = not is_loopback(config.host) or config.uds is not None  # no web page reaches a socket's file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            if scope["method"] != "OPTIONS":
                self._check_key(scope, headers)
            is_json = JSON_TYPE.match(headers.get("content-type", "")) is not None
            if scope["method"] not in SAFE_METHODS and from_page(headers) and not is_json:
                raise RequestError(NOT_JSON, code="invalid_content_type")
        except RequestError as error:
            await ErrorResponse(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if (check := self._check_of(route_of(scope), scope["method"])) is not None:
            check.check(scope, headers)

    def _check_host(self, headers: Headers) -> None:
        """Raises ForbiddenError for a host name that this server does not have."""
        host = headers.get("host", "")
        if self._any_host or not host or _name_in(host) in self._hosts:
            return
        raise ForbiddenError(
            f"This server listens on a loopback address, and does not answer to the host {host[:100]!r}, but to "
            f"{', '.join(sorted(self._hosts))}. Start it with --allowed-host NAME for another name.",
            code="host_not_allowed",
        )

    def _check_of(self, path: str, method: str) -> KeyCheck | ClosedRoute | None:
        if path in self._open_routes:
            return None
        if is_below(path, "/engine"):
            return self._workers
        if is_below(path, *ADMIN_ROUTES):
            return self._admins
        if is_below(path, "/workers"):
            return self._worker_readers if method in SAFE_METHODS else self._admins
        return self._clients


def _key_of(headers: Headers) -> str:
    """Returns the key of a request; empty if it has none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return (given if scheme.lower() == "bearer" else "").strip() or headers.get(KEY_HEADER, "").strip()


def from_page(headers: Headers) -> bool:
    """Returns True if a browser sends the request for a web page."""
    return "origin" in headers or headers.get("sec-fetch-site", "") not in FROM_NO_OTHER_SITE


def is_local(scope: Scope, headers: Headers) -> bool:
    """Returns True if the caller is on this machine and does not forward a request."""
    client = scope.get("client")
    try:
        is_loopback_client = client is not None and ip_address(client[0]).is_loopback
    except ValueError:
        return False
    return is_loopback_client and not from_page(headers) and not any(name in headers for name in FORWARDING)


def _name_in(host: str) -> str:
    """Returns the name in a Host header, without the port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
