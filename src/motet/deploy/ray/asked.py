"""What one can know of a request before its body has come: what its headers say.

Serve's proxy decides then, so n is not known, nor the prompt: who knows n says it in a header, and without it a request
counts as one choice.
"""

import pickle  # noqa: TID251  the proxy has pickled the request, in this very process
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHOICES_HEADER = "x-motet-choices"
SESSION_HEADER = "x-session-id"
LARGEST_REQUEST = 100_000
"""A header that says as much, or more, is a mistake."""


@dataclass(frozen=True)
class Asked:
    """A request, as far as a proxy knows it."""

    session: str = ""
    choices: int = 1


def asked_of(args: Sequence[object], session: str) -> Asked:
    """Of what the proxy hands to a replica, and the session that Serve has found. A call that is none of HTTP has one
    choice."""
    choices = 1
    for name, value in headers_of(args):
        name = name.lower().replace("_", "-")
        if name == CHOICES_HEADER:
            choices = choices_in(value)
        elif name == SESSION_HEADER:
            session = session or value
    return Asked(session, choices)


def named_in(args: Sequence[object]) -> str | None:
    """Which replica the hook of `--prefix-router` names, empty if it knows none; None: it is a request."""
    return args[0] if args and isinstance(args[0], str) else None


def choices_in(text: str) -> int:
    """1 unless it is a number of choices."""
    if not (text.isascii() and text.isdigit() and len(text) < len(str(LARGEST_REQUEST))):
        return 1
    return max(1, int(text))


def headers_of(args: Sequence[object]) -> Iterable[tuple[str, str]]:
    """Of the ASGI scope that the proxy has pickled into the first argument, if it is that."""
    if not args or not isinstance(args[0], bytes):
        return []
    try:
        headers = pickle.loads(args[0]).asgi_scope["headers"]
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    except Exception:  # another version of Serve brings something else: no reason not to route
        return []
