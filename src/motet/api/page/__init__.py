"""The page at `/`: it asks this server for groups, and shows how their choices are written, on which workers, and what
that has cost.

Its files are in `static/` and are sent as they are. They hold no secret and need no key; what the page
asks for is asked over the routes that every client has, with the key that its reader types. A browser runs nothing in
it but these files: `HEADERS` forbid scripts and styles in the text, those of others, and frames around it.
"""

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
"""The file behind each path."""
PAGE_ROUTES = frozenset(ROUTES)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_router(service: Service) -> APIRouter:
    router = new_router(told=False)
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
