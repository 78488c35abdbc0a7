"""Whose request it is: the ids that go along with a group to its engine, to other servers and into the log."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import Request

from motet.api.auth import client_of
from motet.api.request_id import HEADER, is_id, trace_of

SESSION_HEADER = "x-session-id"


@dataclass(frozen=True)
class Caller:
    trace: str
    """The client's `x-request-id`, or the one given to it."""
    session_id: str
    """The client's `x-session-id`, or nothing."""
    client: str
    """Whose limits the request counts against."""


def caller_of(request: Request, *, named: str | None = None) -> Caller:
    """`named`: what the body calls the request; it counts where there is no `x-request-id`."""
    trace = trace_of(request)
    if named is not None and is_id(named) and request.headers.get(HEADER) != trace:
        trace = named
    return Caller(trace, session_id_of(request.headers.items()), client_of(request))


def session_id_of(headers: Iterable[tuple[str, str]]) -> str:
    """Any case, `-` or `_`, as clients and proxies have it. What is no id counts as not given."""
    given = (value for name, value in headers if name.lower().replace("_", "-") == SESSION_HEADER)
    return next(filter(is_id, given), "")
