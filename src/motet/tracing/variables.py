"""OpenTelemetry's environment variables that the server itself uses: which traces it records, and how they are sent.

The process that sends spans uses all other variables (`export`). OpenTelemetry's library warns of an unknown value and
continues with another one; this module raises ConfigError, so that the server does not start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from motet.errors import ConfigError
from motet.tracing.context import TraceContext

DISABLED = "OTEL_SDK_DISABLED"
SAMPLER = "OTEL_TRACES_SAMPLER"
SHARE = "OTEL_TRACES_SAMPLER_ARG"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""Variables for the protocol; the first one takes precedence."""

PARENT_BASED = "parentbased_"
SHARES = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
"""Samplers, each with the share of traces that it keeps; None if the share is in the variable `SHARE`."""
LOW_BITS = 2**64
"""Range of the last 64 bits of a trace id. Like OpenTelemetry's samplers, all servers of a trace decide by them."""


class Protocol(StrEnum):
    """The protocol with which spans are sent to a collector."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


@dataclass(frozen=True)
class Sampling:
    """The rule for which traces are recorded."""

    share: float = 1.0
    """Share of traces, from 0 to 1."""
    parent_based: bool = True
    """True if the client decides for requests that come with a trace."""

    def keeps(self, trace_id: str, sent: TraceContext | None) -> bool:
        """Returns True if the trace is recorded. `sent`: the client's context, if it sent one."""
        if sent is not None and self.parent_based:
            return sent.sampled
        return int(trace_id[-16:], 16) < self.share * LOW_BITS


@dataclass(frozen=True)
class Variables:
    """The values of the variables."""

    disabled: bool = False
    """True if there are no traces at all."""
    sampling: Sampling = field(default_factory=Sampling)
    protocol: Protocol = Protocol.HTTP

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Reads the variables. Empty variables count as not set. Raises ConfigError."""
        disabled = environ.get(DISABLED, "").strip().lower() == "true"
        return cls(disabled, _sampling(environ), _protocol(environ))


def _sampling(environ: Mapping[str, str]) -> Sampling:
    name = environ.get(SAMPLER, "").strip().lower() or PARENT_BASED + "always_on"
    kind = name.removeprefix(PARENT_BASED)
    if kind not in SHARES:
        allowed = ", ".join([*SHARES, *(PARENT_BASED + one for one in SHARES)])
        raise ConfigError(f"{SAMPLER} is {environ[SAMPLER]!r}; allowed are {allowed}")
    share = SHARES[kind]
    return Sampling(_share(environ) if share is None else share, parent_based=kind != name)


def _share(environ: Mapping[str, str]) -> float:
    text = environ.get(SHARE, "").strip() or "1"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{SHARE} is {text!r}; it must be the share of traces to record, from 0 to 1")
    return share


def _protocol(environ: Mapping[str, str]) -> Protocol:
    for name in PROTOCOLS:
        if value := environ.get(name, "").strip():
            try:
                return Protocol(value)
            except ValueError:
                raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(Protocol)}") from None
    return Protocol.HTTP
