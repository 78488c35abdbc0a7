"""The page at `/`: it requests groups from this server, and shows how their choices are generated, on which workers,
and at what cost.

Its files are in `static/` and are sent unchanged. They contain no secret and need no key; the page uses the routes of
all clients, with the key that its reader types. A browser runs nothing in the page except these files: `HEADERS` forbid
inline scripts and styles, third-party scripts and styles, and frames around the page."""

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, Request, Response

from motet.api.http.routes import new_router
from motet.api.service import Service
from motet.errors import NotFoundError

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
ROUTES: Mapping[str, str] = {
    "/" if path.name == INDEX else f"/page/{path.name}": path.name for path in FOLDER.iterdir()
}
"""The file at each path."""
PAGE_ROUTES = frozenset(ROUTES)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_router(service: Service) -> APIRouter:
    router = new_router(documented=False)
    contents = {route: (FOLDER / name).read_bytes() for route, name in ROUTES.items()}

    async def send(request: Request) -> Response:
        route: str = request.scope["route"].path
        if not service.config.page:
            raise NotFoundError(f"Invalid URL (GET {route}): this server shows no page.", code="unknown_url")
        content_type = f"{TYPES[Path(ROUTES[route]).suffix]}; charset=utf-8"
        return Response(contents[route], headers={**HEADERS, "content-type": content_type})

    for route in ROUTES:
        router.add_api_route(route, send, methods=["GET"])
    return router
