"""Other paths for the routes of this server. Requests with them are answered, not redirected, since many clients do not
follow a redirect of a POST:

    any path with slashes at its end             the path without them
    OpenAI's paths without /v1, as in llama.cpp  the path with /v1, for clients whose base URL lacks it

A path with a line break at its end has no route. Starlette's patterns end with `$`, which also matches before a line
break, so `/drain%0A` would reach the route of `/drain`, but not be compared with the paths that need its key.
"""

from motet.api.http.dialect import is_below

WITHOUT_V1 = ("/chat/completions", "/completions", "/decisions", "/responses", "/models", "/files", "/batches")


def usual_path(path: str) -> str:
    """Returns the path of the route for a path, both without the path at which the app is mounted."""
    usual = path.rstrip("/") or "/"
    if usual.endswith("\n"):
        return f"{usual}/"  # matches no pattern
    return f"/v1{usual}" if is_below(usual, *WITHOUT_V1) else usual
