"""How requests find a decode replica that serves clients itself: which of Serve's proxies there is, and what it asks.

Serve's own proxy    a `ChoicesRouter` in it
HAProxy              the fewest connections: it has no use for a router of Serve's
HAProxy and hook     the replica that a router with our own routing names (`--prefix-router`)
"""

import logging
from collections.abc import Mapping

from motet.deploy.ray.options import Options
from motet.errors import ConfigError
from motet.settings import Settings
from motet.types import Ingress

logger = logging.getLogger(__name__)

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
FORWARD_BODY = "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY"
ROUTER = "motet.deploy.ray.request_router.ChoicesRouter"
STATS_PERIOD_S = 2.0
"""Between two records of a replica. A router knows at once what it routed itself; only what others did is so old. Each
record is sent to every proxy with all replicas of the deployment, so they are not to be had for nothing."""
HOOK_RAY = "2.60."
"""Versions of Ray whose hook is known."""


def router_options(settings: Settings, environ: Mapping[str, str]) -> Options:
    """For the deployment that decodes."""
    if settings.ray.ingress is not Ingress.DIRECT:
        return {}
    if _is_on(environ, HAPROXY) and not settings.ray.prefix_router:
        logger.warning(
            "%s is set: HAProxy gives each request to the replica with the fewest connections, whatever its session, "
            "its choices and its prompt; --prefix-router has them heeded",
            HAPROXY,
        )
        return {}
    return {
        "request_router_config": {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"session_ttl_s": settings.routing.session_expiry_s},
            "request_routing_stats_period_s": STATS_PERIOD_S,
        }
    }


def check_hook(settings: Settings, environ: Mapping[str, str], *, ray_version: str) -> None:
    """Raises ConfigError if `--prefix-router` is wanted and cannot be had."""
    if not settings.ray.prefix_router:
        return
    if not ray_version.startswith(HOOK_RAY):
        raise ConfigError(
            f"--prefix-router uses a hook internal to Ray, known in {HOOK_RAY}x: this is Ray {ray_version}. Install "
            "that one, or do without it"
        )
    if missing := [name for name in (HAPROXY, FORWARD_BODY) if not _is_on(environ, name)]:
        raise ConfigError(
            f"--prefix-router needs HAProxy, which sends it the bodies of requests: set "
            f"{' and '.join(f'{name}=1' for name in missing)} here and on all nodes of the cluster before Ray starts"
        )


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name) == "1"
