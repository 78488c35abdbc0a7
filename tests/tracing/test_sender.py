"""The process that sends spans: it must be installed, and the server outlives it."""

import os
import signal
from importlib.metadata import PackageNotFoundError

import pytest

from motet.errors import ConfigError
from motet.tracing import sender as sending
from motet.tracing.sender import Order, Sender, check_exporter, tracer_for
from motet.tracing.spans import NO_TRACES, Recorder
from tests.tracing.collector import Collector

pytestmark = pytest.mark.anyio


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    def find(package: str) -> str:
        if package == "opentelemetry-exporter-otlp-proto-http":
            raise PackageNotFoundError(package)
        return "1.0"

    check_exporter(None, find)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint needs .*-proto-http.*pip install 'motet\[otel\]'"):
        check_exporter("http://127.0.0.1:4318", find)


async def test_without_an_endpoint_there_is_no_process_and_no_trace() -> None:
    async with tracer_for(None, name="server") as tracer:
        assert tracer is NO_TRACES


@pytest.mark.slow
async def test_a_process_that_dies_is_started_again() -> None:
    now_s = 0.0
    with Collector() as collector:
        sender = Sender(Order(f"{collector.url}/my/traces", {"service.instance.id": "a"}), clock=lambda: now_s)
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
