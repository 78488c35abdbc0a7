"""Serve's options for each deployment, and the choice of the replica for a client's request."""

import logging

import pytest

from motet.deploy.ray.options import (
    DECODE,
    DIRECTORY,
    GATEWAY,
    HAPROXY,
    PREFILL,
    REQUEST_ROUTER,
    SHUTDOWN_MARGIN_S,
    check_trainers,
    deployment_options,
    max_replicas_of,
    request_router_options,
)
from motet.errors import ConfigError
from motet.settings.declaration import ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import resolve_settings


def settings(**flags: object) -> Settings:
    return resolve_settings(flags, environ={}, command=ServerCommand.RAY)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, {DIRECTORY, DECODE, GATEWAY}),
        ({"prefill": 1, "decode": 1}, {DIRECTORY, DECODE, GATEWAY, PREFILL}),
        ({"ingress": "direct"}, {DIRECTORY, DECODE}),
        ({"ingress": "direct", "prefill": 1, "decode": 1}, {DIRECTORY, DECODE, PREFILL}),
    ],
)
def test_a_cell_has_the_deployments_that_it_needs(flags: dict[str, object], names: set[str]) -> None:
    options = deployment_options(settings(**flags))
    assert options.keys() == names
    assert all(options[name]["name"] == name for name in names)


def test_the_numbers_of_replicas_are_those_set_and_there_is_one_directory() -> None:
    options = deployment_options(settings(prefill=2, decode=3, gateways=4))
    assert {name: one["num_replicas"] for name, one in options.items()} == {
        DIRECTORY: 1,
        PREFILL: 2,
        DECODE: 3,
        GATEWAY: 4,
    }
    assert max_replicas_of(options[DECODE]) == 3
    assert deployment_options(settings())[DECODE]["num_replicas"] == 1


def test_workers_get_cpus_gpus_and_other_resources_of_their_role() -> None:
    options = deployment_options(
        settings(
            prefill=1,
            decode=1,
            cpus_per_worker=2.0,
            gpus_per_worker=0.5,
            resources_of=["decode=h100:1", "decode=rack:0.1", "gateway=edge:1"],
        )
    )
    assert options[PREFILL]["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 0.5}
    assert options[DECODE]["ray_actor_options"] == {
        "num_cpus": 2.0,
        "num_gpus": 0.5,
        "resources": {"h100": 1.0, "rack": 0.1},
    }
    assert options[GATEWAY]["ray_actor_options"] == {"num_cpus": 0, "resources": {"edge": 1.0}}
    assert options[DIRECTORY]["ray_actor_options"] == {"num_cpus": 0}


def test_answers_have_the_drain_timeout_before_a_replica_is_ended() -> None:
    options = deployment_options(settings(prefill=1, decode=1, drain_timeout_s=100.0))
    for name in (PREFILL, DECODE, GATEWAY):
        assert options[name]["graceful_shutdown_timeout_s"] == 100.0 + SHUTDOWN_MARGIN_S
    assert options[DIRECTORY]["graceful_shutdown_timeout_s"] <= 1.0


def test_dead_replicas_are_detected_within_two_seconds_up_to_200_replicas() -> None:
    """Serve's controller is one process that checks all of them."""
    for decode, period_s in ((1, 2.0), (200, 2.0), (500, 5.0), (10_000, 10.0)):
        options_of_cell = deployment_options(settings(prefill=1, decode=decode))
        assert options_of_cell[DECODE]["health_check_period_s"] == period_s
        assert all(options_of_cell[name]["health_check_period_s"] == 2.0 for name in (DIRECTORY, GATEWAY, PREFILL))


def test_replicas_with_clients_are_checked_every_two_seconds_at_any_number() -> None:
    """Replicas detect by missing checks that Serve is ending them."""
    assert deployment_options(settings(ingress="direct", decode=10_000))[DECODE]["health_check_period_s"] == 2.0


def test_serve_delays_no_request() -> None:
    """The server in the replica refuses requests itself, with a reason."""
    for one in deployment_options(settings(prefill=1, decode=1)).values():
        assert one["max_ongoing_requests"] >= 100_000


def test_gateways_are_updated_without_a_pause_if_they_need_no_resources() -> None:
    options = deployment_options(settings(prefill=1, decode=1))
    assert options[GATEWAY]["max_surge_percent"] == 100
    assert not any("max_surge_percent" in options[name] for name in (DIRECTORY, PREFILL, DECODE))
    assert deployment_options(settings(resources_of=["gateway=edge:1"]))[GATEWAY]["max_surge_percent"] == 0


def direct(**flags: object) -> Settings:
    return settings(**{"ingress": "direct", **flags})


def test_the_proxy_uses_motets_router_with_the_settings_of_sessions() -> None:
    chosen = direct(session_expiry_s=30.0, session_headers=["x-talk"])
    config = request_router_options(chosen, {})["request_router_config"]
    assert config["request_router_class"] == REQUEST_ROUTER
    assert config["request_router_kwargs"] == {"session_ttl_s": 30.0, "session_headers": ["x-talk"]}


def test_with_gateways_serve_uses_its_own_router() -> None:
    assert request_router_options(direct(ingress="gateway"), {}) == {}


def test_haproxy_gets_no_router_and_a_warning_names_the_alternative(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert request_router_options(direct(), {HAPROXY: "1"}) == {}
    assert "--ingress gateway" in caplog.text


def test_trainers_need_a_single_gateway_that_passes_weights_on_to_all_workers() -> None:
    check_trainers(settings(rl=True))
    check_trainers(direct())
    for flags in ({"ingress": "direct"}, {"gateways": 2}):
        with pytest.raises(ConfigError, match="--rl needs --ingress gateway and --gateways 1"):
            check_trainers(settings(rl=True, **flags))
