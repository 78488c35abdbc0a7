"""OpenTelemetry's own variables that the server itself must know: which traces it records, and how they are sent.

The process that sends spans heeds all others (`export`). Where OpenTelemetry's library warns of a value that it does
not know and goes on with another one, this raises ConfigError: the server does not start.
"""

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
"""The first one wins."""

PARENT_BASED = "parentbased_"
SHARES = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
"""The samplers, each with the share of traces that it keeps; None: that is in `SHARE`."""
LOW_BITS = 2**64
"""A sampler looks at the last 64 bits of a trace's id, as OpenTelemetry's do: all servers of a trace decide alike."""


class Protocol(StrEnum):
    """How spans go to a collector."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


@dataclass(frozen=True)
class Sampling:
    """Which traces are recorded."""

    share: float = 1.0
    """From 0, none, to 1, all."""
    parent_based: bool = True
    """True: of a request that comes with a trace, its client has decided."""

    def keeps(self, trace_id: str, sent: TraceContext | None) -> bool:
        """`sent`: the span of the client, if it sent one."""
        if sent is not None and self.parent_based:
            return sent.sampled
        return int(trace_id[-16:], 16) < self.share * LOW_BITS


@dataclass(frozen=True)
class Variables:
    disabled: bool = False
    """True if there are to be no traces at all."""
    sampling: Sampling = field(default_factory=Sampling)
    protocol: Protocol = Protocol.HTTP

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Raises ConfigError. A variable that is empty counts as not set."""
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
    told = environ.get(SHARE, "").strip() or "1"
    try:
        share = float(told)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{SHARE} is {told!r}; it must be the share of traces to record, from 0 to 1")
    return share


def _protocol(environ: Mapping[str, str]) -> Protocol:
    for name in PROTOCOLS:
        if told := environ.get(name, "").strip():
            try:
                return Protocol(told)
            except ValueError:
                raise ConfigError(f"{name} is {told!r}; allowed are {', '.join(Protocol)}") from None
    return Protocol.HTTP
