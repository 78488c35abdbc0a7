"""The options that Serve gets for each deployment, and who decides where a client's request goes."""

import logging

import pytest

from motet.deploy.ray.options import (
    DECODE,
    DIRECTORY,
    END_MARGIN_S,
    FORWARD_BODY,
    GATEWAY,
    HAPROXY,
    PREFILL,
    REQUEST_ROUTER,
    check_hook,
    check_trainers,
    deployment_options,
    most_replicas,
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


def test_there_are_as_many_replicas_as_set_and_one_directory() -> None:
    options = deployment_options(settings(prefill=2, decode=3, gateways=4))
    assert {name: one["num_replicas"] for name, one in options.items()} == {
        DIRECTORY: 1,
        PREFILL: 2,
        DECODE: 3,
        GATEWAY: 4,
    }
    assert most_replicas(options[DECODE]) == 3
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


def test_answers_have_their_time_before_a_replica_is_ended() -> None:
    options = deployment_options(settings(prefill=1, decode=1, drain_timeout_s=100.0))
    for name in (PREFILL, DECODE, GATEWAY):
        assert options[name]["graceful_shutdown_timeout_s"] == 100.0 + END_MARGIN_S
    assert options[DIRECTORY]["graceful_shutdown_timeout_s"] <= 1.0


def test_dead_replicas_are_noticed_within_two_seconds_unless_there_are_very_many() -> None:
    """Serve's controller is one process that asks all of them."""
    for decode, period_s in ((1, 2.0), (200, 2.0), (500, 5.0), (10_000, 10.0)):
        behind_gateways = deployment_options(settings(prefill=1, decode=decode))
        assert behind_gateways[DECODE]["health_check_period_s"] == period_s
        assert all(behind_gateways[name]["health_check_period_s"] == 2.0 for name in (DIRECTORY, GATEWAY, PREFILL))


def test_replicas_with_clients_are_asked_often_however_many_there_are() -> None:
    """That is how they notice that they are to end."""
    assert deployment_options(settings(ingress="direct", decode=10_000))[DECODE]["health_check_period_s"] == 2.0


def test_serve_holds_back_no_request() -> None:
    """The server in the replica refuses requests itself, with a reason."""
    for one in deployment_options(settings(prefill=1, decode=1)).values():
        assert one["max_ongoing_requests"] >= 100_000


def test_gateways_are_updated_without_a_pause_where_they_need_no_room() -> None:
    options = deployment_options(settings(prefill=1, decode=1))
    assert options[GATEWAY]["max_surge_percent"] == 100
    assert not any("max_surge_percent" in options[name] for name in (DIRECTORY, PREFILL, DECODE))
    assert deployment_options(settings(resources_of=["gateway=edge:1"]))[GATEWAY]["max_surge_percent"] == 0


BOTH = {HAPROXY: "1", FORWARD_BODY: "1"}


def direct(**flags: object) -> Settings:
    return settings(**{"ingress": "direct", **flags})


def test_the_proxy_uses_our_router_with_the_time_that_sessions_last() -> None:
    config = request_router_options(direct(session_expiry_s=30.0), {})["request_router_config"]
    assert config["request_router_class"] == REQUEST_ROUTER
    assert config["request_router_kwargs"] == {"session_ttl_s": 30.0}


def test_behind_gateways_serve_chooses_as_it_likes() -> None:
    assert request_router_options(direct(ingress="gateway"), {}) == {}


def test_haproxy_ignores_the_router_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert request_router_options(direct(), {HAPROXY: "1"}) == {}
    assert "--prefix-router" in caplog.text


def test_with_the_hook_haproxy_has_a_router() -> None:
    assert request_router_options(direct(prefix_router=True), BOTH)["request_router_config"]


def test_the_hook_works_only_with_known_versions_of_ray() -> None:
    check_hook(direct(prefix_router=True), BOTH, ray_version="2.60.1")
    with pytest.raises(ConfigError, match=r"--prefix-router .* 2\.60\.x, and this is Ray 2\.61\.0"):
        check_hook(direct(prefix_router=True), BOTH, ray_version="2.61.0")


@pytest.mark.parametrize("missing", [HAPROXY, FORWARD_BODY])
def test_the_hook_needs_haproxy_and_the_bodies(missing: str) -> None:
    environ = {name: value for name, value in BOTH.items() if name != missing}
    with pytest.raises(ConfigError, match=f"--prefix-router needs HAProxy.*{missing}=1"):
        check_hook(direct(prefix_router=True), environ, ray_version="2.60.0")


def test_without_the_flag_nothing_is_checked() -> None:
    check_hook(direct(), {}, ray_version="3.0")


def test_trainers_need_the_one_gateway_that_passes_weights_on_to_all() -> None:
    check_trainers(settings(rl=True))
    check_trainers(direct())
    for flags in ({"ingress": "direct"}, {"gateways": 2}):
        with pytest.raises(ConfigError, match="--rl needs --ingress gateway and --gateways 1"):
            check_trainers(settings(rl=True, **flags))
