"""The process that sends spans: it must be installed, and the server outlives it."""

import os
import signal
from importlib.metadata import PackageNotFoundError

import pytest

from motet.config import environment
from motet.errors import ConfigError
from motet.tracing import sender as sending
from motet.tracing.sender import Order, Sender, tracer_for, traces_wanted
from motet.tracing.spans import NO_TRACES, Recorder
from tests.tracing.collector import Collector, GrpcCollector

pytestmark = pytest.mark.anyio


ENDPOINT = "http://127.0.0.1:4318"
GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


@pytest.mark.parametrize(("environ", "package"), [({}, "-proto-http"), (GRPC, "-proto-grpc")], ids=["http", "grpc"])
def test_a_missing_package_is_named_with_what_installs_it(environ: dict[str, str], package: str) -> None:
    def find(name: str) -> str:
        if name.endswith(package):
            raise PackageNotFoundError(name)
        return "1.0"

    assert traces_wanted(None, environ, find) is None
    with pytest.raises(ConfigError, match=rf"--otlp-endpoint needs .*{package}.*pip install 'motet\[otel\]'"):
        traces_wanted(ENDPOINT, environ, find)


@pytest.mark.parametrize(("endpoint", "disabled"), [(None, "false"), (ENDPOINT, "true")])
async def test_without_an_endpoint_or_if_disabled_there_is_no_process_and_no_trace(
    endpoint: str | None, disabled: str
) -> None:
    async with tracer_for(endpoint, name="server", environ={"OTEL_SDK_DISABLED": disabled}) as tracer:
        assert tracer is NO_TRACES


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_the_variables_of_opentelemetry_are_in_force(protocol: str) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20secret",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_RESOURCE_ATTRIBUTES": "team=blue",
    }
    with (GrpcCollector if protocol == "grpc" else Collector)() as collector:
        settings = tracer_for(collector.url, name="a", environ={**environment(), **environ})
        async with settings as tracer:
            tracer.request(None).end()
        (span,) = collector.spans
    assert collector.headers["x-key"] == "a secret"
    told = {name: span.service[name] for name in ("service.name", "team", "service.instance.id")}
    assert told == {"service.name": "mine", "team": "blue", "service.instance.id": "a"}


@pytest.mark.slow
async def test_a_process_that_dies_is_started_again() -> None:
    now_s = 0.0
    with Collector() as collector:
        sender = Sender(
            Order(f"{collector.url}/my/traces", {"service.instance.id": "a"}), environment(), clock=lambda: now_s
        )
        await sender.start()
        tracer = Recorder(sender.take)
        tracer.request(None).end()
        sender.hand_over()
        collector.until(lambda spans: len(spans) == 1)
        assert sender.process is not None
        os.kill(sender.process.pid, signal.SIGTERM)  # it ends with its server, not with a signal that all get
        tracer.request(None).end()
        await sender.close()
        assert len(collector.spans) == 2

        await sender.start()
        killed = sender.process
        assert killed is not None
        killed.kill()
        await killed.wait()
        tracer.request(None).end()
        sender.hand_over()
        assert (sender.num_dropped, sender.process) == (1, killed)
        now_s += sending.START_AGAIN_S
        tracer.request(None).end()
        sender.hand_over()
        await sender.started()
        tracer.request(None).end()
        await sender.close()
        assert sender.num_dropped == 2
        assert len(collector.spans) == 3
    assert collector.paths == {"/my/traces"}
    assert {one.service["service.instance.id"] for one in collector.spans} == {"a"}
