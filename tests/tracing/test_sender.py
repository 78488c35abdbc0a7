"""The process that sends spans: its packages must be installed, and the server survives its death."""

import asyncio
import os
import signal
import socket
from importlib.metadata import PackageNotFoundError

import pytest

from motet.errors import ConfigError
from motet.settings.server_config import environment
from motet.tracing import sender as sending
from motet.tracing.sender import ExportSettings, Sender, trace_variables, tracer_for
from motet.tracing.spans import NO_TRACES, RecordingTracer
from tests.patience import PATIENCE_S
from tests.tracing.collector import Collector, GrpcCollector

pytestmark = pytest.mark.anyio


ENDPOINT = "http://127.0.0.1:4318"
GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the time limit: a process that has just started may not have read its settings when its standard input
    ends."""
    monkeypatch.setattr(sending, "CLOSE_S", PATIENCE_S)


@pytest.mark.parametrize(("environ", "package"), [({}, "-proto-http"), (GRPC, "-proto-grpc")], ids=["http", "grpc"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(environ: dict[str, str], package: str) -> None:
    def find(name: str) -> str:
        if name.endswith(package):
            raise PackageNotFoundError(name)
        return "1.0"

    assert trace_variables(None, environ, find=find) is None
    with pytest.raises(ConfigError, match=rf"--otlp-endpoint needs .*{package}.*pip install 'motet\[otel\]'"):
        trace_variables(ENDPOINT, environ, find=find)


@pytest.mark.parametrize(("endpoint", "disabled"), [(None, "false"), (ENDPOINT, "true")])
async def test_without_an_endpoint_or_if_disabled_there_are_no_traces(endpoint: str | None, disabled: str) -> None:
    async with tracer_for(endpoint, name="server", environ={"OTEL_SDK_DISABLED": disabled}) as tracer:
        assert tracer is NO_TRACES


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_the_variables_of_opentelemetry_apply(protocol: str) -> None:
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
    attributes = {name: span.service[name] for name in ("service.name", "team", "service.instance.id")}
    assert attributes == {"service.name": "mine", "team": "blue", "service.instance.id": "a"}


@pytest.mark.slow
async def test_a_process_that_dies_is_restarted() -> None:
    now_s = 0.0
    with Collector() as collector:
        sender = Sender(
            ExportSettings(f"{collector.url}/my/traces", {"service.instance.id": "a"}, close_s=PATIENCE_S),
            environment(),
            clock=lambda: now_s,
        )
        await sender.start()
        tracer = RecordingTracer(sender.take)
        tracer.request(None).end()
        sender.flush()
        collector.until(lambda spans: len(spans) == 1)
        assert sender.process is not None
        os.kill(sender.process.pid, signal.SIGTERM)  # it ends with its server, not by a signal to all processes
        tracer.request(None).end()
        await sender.close()
        assert len(collector.spans) == 2

        await sender.start()
        killed = sender.process
        assert killed is not None
        killed.kill()
        await killed.wait()
        tracer.request(None).end()
        sender.flush()
        assert (sender.num_dropped, sender.process) == (1, killed)
        now_s += sending.MIN_RESTART_INTERVAL_S
        tracer.request(None).end()
        sender.flush()
        await sender.started()
        tracer.request(None).end()
        await sender.close()
        assert sender.num_dropped == 2
        assert len(collector.spans) == 3
    assert collector.paths == {"/my/traces"}
    assert {one.service["service.instance.id"] for one in collector.spans} == {"a"}


@pytest.mark.slow
async def test_spans_beyond_a_few_megabytes_are_dropped_if_the_process_does_not_read() -> None:
    with Collector() as collector:
        sender = Sender(ExportSettings(collector.url, {}, close_s=PATIENCE_S), environment())
        await sender.start()
        assert sender.process is not None
        os.kill(sender.process.pid, signal.SIGSTOP)
        tracer = RecordingTracer(sender.take)
        for _ in range(20):
            span = tracer.request(None)
            span.note({"text": "x" * 2**20})
            span.end()
            sender.flush()
        os.kill(sender.process.pid, signal.SIGCONT)
        await sender.close()
    assert sender.num_dropped >= 20 - sending.MAX_UNREAD_BYTES // 2**20 - 2
    assert len(collector.spans) == 20 - sender.num_dropped


@pytest.mark.slow
async def test_spans_that_a_collector_refuses_are_logged_once_and_later_ones_arrive(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Collector() as collector:
        collector.status = 500
        sender = Sender(
            ExportSettings(collector.url, {}, close_s=PATIENCE_S), {**environment(), "OTEL_BSP_SCHEDULE_DELAY": "50"}
        )
        await sender.start()
        tracer, log = RecordingTracer(sender.take), ""
        while "code: 500" not in log:
            tracer.request(None).end()
            sender.flush()
            await asyncio.sleep(0.05)
            log += capfd.readouterr().err
        collector.status = 200
        tracer.request(None).end()
        await sender.close()
    assert collector.spans and sender.num_dropped == 0
    assert len((log + capfd.readouterr().err).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "the last spans could not be sent to the collector in time and are lost"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "1"}, "spans cannot be sent: ValueError: "),
    ],
)
async def test_lost_spans_are_logged(capfd: pytest.CaptureFixture[str], environ: dict[str, str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sender = Sender(ExportSettings(url, {}, close_s=0.2), {**environment(), **environ})
        await sender.start()
        RecordingTracer(sender.take).request(None).end()
        process = sender.process
        await sender.close()
    assert process is not None and process.returncode == 1
    assert message in capfd.readouterr().err
