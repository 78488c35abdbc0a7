"""The id of a request's conversation, as clients and proxies send it. Used by the API, which passes the id on to
prefill workers and to other servers, and by the proxies on Ray, which choose a replica by it.

The next prompt of a session usually starts with its previous prompt, so routers send it to the worker that has the
previous prompt cached."""

import re
from collections.abc import Iterable, Mapping

SESSION_HEADER = "x-session-id"
"""Header that takes precedence, and in which the id is sent to other servers. OpenCode sends it too."""
KNOWN_HEADERS = ("x-dynamo-session-id", "x-claude-code-session-id", "session-id")
"""Headers of Dynamo's clients, of Claude Code and of Codex, in the order of precedence."""
HEADER_PATTERN = r"(?i:(?!(authorization|cookie|x-api-key)$)[\w!#$%&'*+.^`|~-]{1,100})"
"""Names of session headers. Headers with keys are excluded: a session id is logged and sent to other servers."""
RAY_HEADER_VARIABLE = "RAY_SERVE_SESSION_ID_HEADER_KEY"
"""Variable with which the operator of a Ray cluster names the session header of Serve's proxies."""

_ID = re.compile(r"[\x21-\x7e]{1,200}")


def is_id(text: str) -> bool:
    """Returns True if the text can be used as an id in a header and in a log line."""
    return _ID.fullmatch(text) is not None


class SessionHeaders:
    """Reads the session from the headers of a request. Names match in any case, with `-` or `_`, because clients and
    proxies change both."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names`: additional headers of the operator; they precede `KNOWN_HEADERS`."""
        in_order = map(_plain, (SESSION_HEADER, *names, *KNOWN_HEADERS))
        self._ranks = {name: rank for rank, name in enumerate(dict.fromkeys(in_order))}

    def session_of(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Returns the first valid id of the header with the highest precedence; empty if there is none. `headers`: as
        in an ASGI scope."""
        best, session = len(self._ranks), ""
        for name, value in headers:
            rank = self._ranks.get(_plain(name.decode("latin-1")), best)
            if rank < best and is_id(text := value.decode("latin-1")):
                best, session = rank, text
        return session


def headers_on_ray(names: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the additional session headers of a replica or proxy: `names`, and the name in the node's environment."""
    return (*names, *filter(None, (environ.get(RAY_HEADER_VARIABLE, "").strip(),)))


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
