"""Checks before a cluster starts, the config that Serve takes, and its reasons for a delay. These tests import Ray."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from motet.deploy.ray.options import serve_config
from motet.errors import ConfigError, StartupError
from motet.settings.declaration import ServerCommand
from motet.settings.resolve import names_of, resolve_settings
from motet.settings.server_config import ServerConfig
from tests.deploy.ray.test_serve_config import FLAGS

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_taken_port_is_reported_before_anything_is_started() -> None:
    """Serve used to try for a minute to listen there, and then showed a traceback."""
    from motet.deploy.ray.foreground import LOCAL, connected  # imported here: it takes seconds

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"--port {port}: another program listens there"),
            connected(LOCAL, server=ServerConfig(served_model_name="", port=port), cpus=1),
        ):
            pass


def test_a_cluster_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: on a busy machine, Ray's exception ended the command with a traceback."""
    from motet.deploy.ray import foreground  # imported here: it takes seconds

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", init)
    with (
        pytest.raises(StartupError, match="Ray cannot start a cluster on this machine: The current node timed out"),
        foreground.connected(foreground.LOCAL, server=ServerConfig(served_model_name="", port=0), cpus=1),
    ):
        pass


@pytest.mark.parametrize("flags", [FLAGS, {}])
def test_the_config_is_one_for_serve(flags: dict[str, object]) -> None:
    from ray.serve.schema import ServeDeploySchema  # imported here: it takes seconds

    text = serve_config(resolve_settings(flags, environ={}, command=ServerCommand.RAY))
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert schema.http_options.port == flags.get("port", 8000)
    (application,) = schema.applications
    assert application.import_path == "motet.deploy.ray.app:application"
    assert set(application.args) <= set(names_of(ServerCommand.RAY))


def test_serve_s_reasons_for_a_delay_are_logged_in_one_line() -> None:
    from motet.deploy.ray.foreground import reasons_for_delay  # imported here: it takes seconds

    slow = SimpleNamespace(message="2 replicas\nwait for CPUs")
    application: Any = SimpleNamespace(deployments={"Prefill": slow, "Decode": SimpleNamespace(message="")})
    assert reasons_for_delay(application) == "Prefill: 2 replicas wait for CPUs"
    assert reasons_for_delay(None) == ""
