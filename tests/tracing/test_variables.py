"""OpenTelemetry's variables: which traces are recorded, and which values are refused at the start of a server."""

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from motet.errors import ConfigError
from motet.tracing.context import TraceContext
from motet.tracing.spans import RecordingTracer
from motet.tracing.variables import Protocol, Sampling, Variables
from tests.tracing.recorded import RecordedTracer

SENT = TraceContext("0" * 31 + "1", "1" * 16)
NOT_SAMPLED = SENT.unsampled
LAST = TraceContext("f" * 32, "1" * 16)
"""A trace that a sampler keeps only if it keeps all traces."""


@pytest.mark.parametrize(
    ("sampler", "share", "kept"),
    [
        ("", "", (True, True, False, True)),
        ("parentbased_always_on", "0", (True, True, False, True)),
        ("parentbased_always_off", "", (False, True, False, True)),
        ("parentbased_traceidratio", "0", (False, True, False, True)),
        ("parentbased_traceidratio", "", (True, True, False, True)),
        ("Always_On", "", (True, True, True, True)),
        ("always_off", "", (False, False, False, False)),
        ("traceidratio", "0.5", (None, True, True, False)),
    ],
)
def test_a_sampler_determines_which_requests_have_spans(
    sampler: str, share: str, kept: tuple[bool | None, bool, bool, bool]
) -> None:
    environ = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": share}
    tracer = RecordedTracer(Variables.of(environ).sampling)
    for sent, expected in zip((None, SENT, NOT_SAMPLED, LAST), kept, strict=True):
        span = tracer.request(sent)
        assert expected in (None, span.recorded)
        context = span.context
        assert context is not None  # passed on to the next server
        assert context.sampled == span.recorded
        assert sent is None or context.trace_id == sent.trace_id


def test_a_share_of_traces_equals_that_of_opentelemetrys_own_sampler() -> None:
    sampling, reference = Sampling(0.3), TraceIdRatioBased(0.3)
    draw = RecordingTracer(lambda _: None).draw
    for trace_id in [draw(128) for _ in range(200)]:
        decision = reference.should_sample(None, trace_id, "").decision
        assert sampling.keeps(f"{trace_id:032x}", None) == (decision is Decision.RECORD_AND_SAMPLE)


def test_unsampled_spans_leave_no_record() -> None:
    tracer = RecordedTracer(Sampling(0.0))
    span = tracer.request(None)
    child = span.child("group")
    for one in (tracer.of(child.context).child("queue"), child, span):
        one.note({"a": 1})
        one.end(error="lost")
    assert tracer.records == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_TRACES_SAMPLER", "parentbased_"),
        ("OTEL_TRACES_SAMPLER_ARG", "half"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.5"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "udp"),
    ],
)
def test_an_invalid_value_is_refused_with_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}'; "):
        Variables.of({"OTEL_TRACES_SAMPLER": "traceidratio", name: value})


def test_the_protocol_of_traces_takes_precedence() -> None:
    both = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    assert Variables.of(both).protocol is Protocol.GRPC
    assert Variables.of(dict.fromkeys(both, "")).protocol is Protocol.HTTP
