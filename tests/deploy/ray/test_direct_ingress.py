"""Who decides where a request of a client goes when decode replicas serve them, and what is refused at once."""

import logging

import pytest

from motet.deploy.ray.direct_ingress import FORWARD_BODY, HAPROXY, ROUTER, check_hook, router_options
from motet.errors import ConfigError
from motet.settings import Settings, resolve_settings
from motet.settings.record import RAY

BOTH = {HAPROXY: "1", FORWARD_BODY: "1"}


def settings(**given: object) -> Settings:
    return resolve_settings({"ingress": "direct", **given}, environ={}, names=RAY)


def test_the_proxy_asks_our_router_and_is_told_how_long_sessions_last() -> None:
    config = router_options(settings(session_expiry_s=30.0), {})["request_router_config"]
    assert config["request_router_class"] == ROUTER
    assert config["request_router_kwargs"] == {"session_ttl_s": 30.0}


def test_behind_gateways_serve_chooses_as_it_likes() -> None:
    assert router_options(settings(ingress="gateway"), {}) == {}


def test_haproxy_has_no_use_for_a_router_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert router_options(settings(), {HAPROXY: "1"}) == {}
    assert "--prefix-router" in caplog.text


def test_with_the_hook_haproxy_has_a_router() -> None:
    assert router_options(settings(prefix_router=True), BOTH)["request_router_config"]


def test_the_hook_is_for_the_ray_it_is_known_in() -> None:
    check_hook(settings(prefix_router=True), BOTH, ray_version="2.60.1")
    with pytest.raises(ConfigError, match=r"--prefix-router .* 2\.60\.x: this is Ray 2\.61\.0"):
        check_hook(settings(prefix_router=True), BOTH, ray_version="2.61.0")


@pytest.mark.parametrize("missing", [HAPROXY, FORWARD_BODY])
def test_the_hook_needs_haproxy_and_the_bodies(missing: str) -> None:
    environ = {name: value for name, value in BOTH.items() if name != missing}
    with pytest.raises(ConfigError, match=f"--prefix-router needs HAProxy.*{missing}=1"):
        check_hook(settings(prefix_router=True), environ, ray_version="2.60.0")


def test_without_the_flag_nothing_is_checked() -> None:
    check_hook(settings(), {}, ray_version="3.0")
