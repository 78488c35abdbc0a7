"""W3C Trace Context: the two headers by which a request carries its place in a trace from server to server.

    traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
                 version, trace id, span id of the sender, flags (1: the sender records this trace)
    tracestate:  what other tracing systems want to be carried on, `key=value,key=value`; passed on as it came

A `traceparent` that is not valid counts as none, and both headers with it: then the request begins a trace of its own.
A `tracestate` that is not valid is left out, alone, as W3C says. It is checked here in full: OpenTelemetry's library,
which gets it next, would quote it in a warning.
"""

import re
from collections.abc import Mapping

import msgspec

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
SAMPLED = 1
"""The flag of a trace that is recorded."""
MAX_STATE_CHARS = 512
MAX_STATE_MEMBERS = 32

_PARENT = re.compile(r"(?P<version>[0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?P<more>-.*)?")
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class TraceContext(msgspec.Struct, frozen=True):
    """A span of a trace, as its children need to know it, here or on another server."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    flags: int = SAMPLED
    state: str = ""
    """The `tracestate` of the client."""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def unsampled(self) -> "TraceContext":
        """This span, with the word that its trace is not recorded."""
        return msgspec.structs.replace(self, flags=self.flags & ~SAMPLED) if self.sampled else self

    @property
    def headers(self) -> dict[str, str]:
        """The headers that make a request a child of this span; an empty one is not sent."""
        return {
            TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}",
            TRACESTATE: self.state,
        }


def headers_of(context: TraceContext | None) -> Mapping[str, str]:
    return {} if context is None else context.headers


def context_in(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Returns what the two headers say; None if the first is missing or not valid."""
    found = _PARENT.fullmatch(traceparent.strip(" \t"))
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    trace_id, span_id, flags = found[2], found[3], int(found[4], 16)
    if not (int(trace_id, 16) and int(span_id, 16)):
        return None
    return TraceContext(trace_id, span_id, flags, tracestate and _state_in(tracestate))


def _state_in(tracestate: str) -> str:
    """Returns the members of a `tracestate`, without space between them; nothing if it is not valid."""
    if len(tracestate) > MAX_STATE_CHARS:
        return ""
    members = [member for part in tracestate.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    valid = len(keys) == len(members) <= MAX_STATE_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if valid else ""
