"""Checks before a cluster starts, and the config that Serve takes. These tests are in a separate file since they
import Ray."""

import asyncio
import logging
import socket
from types import SimpleNamespace

import pytest
import yaml  # type: ignore[import-untyped]

from motet.deploy.ray.options import serve_config
from motet.errors import ConfigError
from motet.settings.declaration import ServerCommand
from motet.settings.resolve import names_of, resolve_settings
from tests.deploy.ray.test_serve_config import FLAGS

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_taken_port_is_reported_before_anything_is_started() -> None:
    """Serve used to try for a minute to listen there, and then showed a traceback."""
    from motet.deploy.ray.foreground import LOCAL, connected  # here, not above: it takes seconds

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"--port {port}: another program listens there"),
            connected(LOCAL, host="127.0.0.1", port=port, cpus=1),
        ):
            pass


@pytest.mark.parametrize("flags", [FLAGS, {}])
def test_the_config_is_one_for_serve(flags: dict[str, object]) -> None:
    from ray.serve.schema import ServeDeploySchema  # here, not above: it takes seconds

    text = serve_config(resolve_settings(flags, environ={}, command=ServerCommand.RAY))
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert schema.http_options.port == flags.get("port", 8000)
    (application,) = schema.applications
    assert application.import_path == "motet.deploy.ray.app:application"
    assert set(application.args) <= set(names_of(ServerCommand.RAY))


def test_the_reasons_of_a_delay_are_logged_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from motet.deploy.ray import foreground  # here, not above: it takes seconds

    signals = SimpleNamespace(drain=asyncio.Event())

    async def deployed(*_: object) -> bool:
        return True

    def status() -> SimpleNamespace:
        if caplog.records:
            signals.drain.set()
        slow = SimpleNamespace(message="2 replicas\nwait for CPUs")
        return SimpleNamespace(applications={"motet": SimpleNamespace(status=None, deployments={"Prefill": slow})})

    for name, value in {"_done": deployed, "_status": status, "POLLS": 1, "POLL_S": 0.0}.items():
        monkeypatch.setattr(foreground, name, value)
    with caplog.at_level(logging.WARNING, logger="motet"):
        started = foreground.until_started("motet", SimpleNamespace, signals=signals)  # type: ignore[arg-type]
        assert not asyncio.run(started)
    assert [record.message for record in caplog.records] == [
        "the application motet is not ready yet: Prefill: 2 replicas wait for CPUs"
    ]
