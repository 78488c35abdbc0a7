"""The dialect of an answer, OpenAI's or Anthropic's. It depends on the route, and on some routes on the headers:

/v1/messages, and below       Anthropic's
/v1/models, and below         Anthropic's for its clients, else OpenAI's
all other paths               OpenAI's
"""

from starlette.datastructures import Headers
from starlette.types import Scope

MESSAGES = "/v1/messages"
MODELS = "/v1/models"
ANTHROPIC_VERSION = "anthropic-version"
"""The header with a version of Anthropic's dialect, which only Anthropic's clients send."""


def speaks_anthropic(scope: Scope) -> bool:
    """Returns True if the answer must be in Anthropic's dialect."""
    path = route_of(scope)
    return of_messages(path) or (is_below(path, MODELS) and ANTHROPIC_VERSION in Headers(scope=scope))


def of_messages(path: str) -> bool:
    """Returns True for the routes that have Anthropic's dialect for all clients."""
    return is_below(path, MESSAGES)


def is_below(path: str, *routes: str) -> bool:
    """Returns True for the path of one of the routes, and for every path below one."""
    return any(path == route or path.startswith(f"{route}/") for route in routes)


def route_of(scope: Scope) -> str:
    """Returns the path as routes see it: without the path at which the app is mounted, on Ray its `route_prefix`."""
    return within_mount(str(scope["path"]), str(scope.get("root_path", "")))


def within_mount(path: str, mounted_at: str) -> str:
    """Returns a path without the path in front of it at which the app is mounted, if it has it."""
    within = path.removeprefix(mounted_at)  # Starlette removes it only before a slash
    return within if within.startswith("/") else path
