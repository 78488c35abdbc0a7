"""Which dialect a request is answered in, OpenAI's or Anthropic's. Its route says so, and on some routes its headers:

/v1/messages, and below       Anthropic's
/v1/models, and below         Anthropic's with its clients, else OpenAI's
all others                    OpenAI's
"""

from starlette.datastructures import Headers
from starlette.types import Scope

MESSAGES = "/v1/messages"
MODELS = "/v1/models"
ANTHROPIC_VERSION = "anthropic-version"
"""The header in which Anthropic's clients, and no others, send a version of its dialect."""


def speaks_anthropic(scope: Scope) -> bool:
    """Returns True if the answer is to be in Anthropic's dialect."""
    path = route_of(scope)
    return of_messages(path) or (is_below(path, MODELS) and ANTHROPIC_VERSION in Headers(scope=scope))


def of_messages(path: str) -> bool:
    """Returns True for the routes that speak Anthropic's dialect with everybody."""
    return is_below(path, MESSAGES)


def is_below(path: str, *routes: str) -> bool:
    """Returns True for the path of one of the routes too."""
    return any(path == route or path.startswith(f"{route}/") for route in routes)


def route_of(scope: Scope) -> str:
    """Returns the path as routes see it: without that under which the app is mounted, on Ray its `route_prefix`."""
    path, mounted = str(scope["path"]), str(scope.get("root_path", ""))
    within = path.removeprefix(mounted)  # Starlette takes it off only before a slash
    return within if within.startswith("/") else path
