"""W3C Trace Context: the two headers with which a request carries its place in a trace from server to server.

    traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
                 version, trace id, span id of the sender, flags (1: the sender records this trace)
    tracestate:  data of other tracing systems, `key=value,key=value`, passed on unchanged

If `traceparent` is invalid, both headers are ignored, and the request starts a new trace. An invalid `tracestate` is
left out alone, as W3C specifies. It is validated completely here: OpenTelemetry's library, which receives it later,
would quote it in a warning."""

import re
from collections.abc import Mapping

import msgspec

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
SAMPLED = 1
"""Flag of a trace that is recorded."""
MAX_STATE_CHARS = 512
MAX_STATE_MEMBERS = 32

_PARENT = re.compile(r"(?P<version>[0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?P<more>-.*)?")
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class TraceContext(msgspec.Struct, frozen=True):
    """A span of a trace, with the facts that its children need, on this server or on another one."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    flags: int = SAMPLED
    state: str = ""
    """`tracestate` of the client."""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def unsampled(self) -> "TraceContext":
        """This span, marked as part of a trace that is not recorded."""
        return msgspec.structs.replace(self, flags=self.flags & ~SAMPLED) if self.sampled else self

    @property
    def headers(self) -> dict[str, str]:
        """Headers that make a request a child of this span. Empty ones are not sent."""
        return {TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}", TRACESTATE: self.state}


def headers_of(context: TraceContext | None) -> Mapping[str, str]:
    return {} if context is None else context.headers


def context_in(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parses the two headers. Returns None if the first is missing or invalid."""
    found = _PARENT.fullmatch(traceparent.strip(" \t"))
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    trace_id, span_id, flags = found[2], found[3], int(found[4], 16)
    if not (int(trace_id, 16) and int(span_id, 16)):
        return None
    return TraceContext(trace_id, span_id, flags, tracestate and _state_in(tracestate))


def _state_in(tracestate: str) -> str:
    """Returns the members of a `tracestate` without spaces between them; empty if it is invalid."""
    if len(tracestate) > MAX_STATE_CHARS:
        return ""
    members = [member for part in tracestate.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    valid = len(keys) == len(members) <= MAX_STATE_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if valid else ""
