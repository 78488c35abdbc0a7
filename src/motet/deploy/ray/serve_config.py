"""The application as a config file, for `serve deploy` and for the `serveConfigV2` of a KubeRay `RayService`."""

import json
from collections.abc import Iterable

from motet.settings import Settings
from motet.settings.record import RAY, SECRETS
from motet.settings.resolve import known_setting

IMPORT_PATH = "motet.deploy.ray.app:application"
SERVE_SETTINGS = frozenset({"port", "app_name", "ray_address"})
"""Said in the config itself, or by who deploys it. The host is said twice: replicas have servers of their own."""


def serve_config(settings: Settings) -> str:
    """YAML; every value is written as JSON, which is YAML too, but for its way to escape what is not ASCII. Keys are
    left out."""
    server, ray = settings.server(served_model_name=""), settings.ray
    chosen = settings.chosen()
    args = {name: value for name, value in chosen.items() if name not in SERVE_SETTINGS | SECRETS}
    secrets = ", ".join(name for name in chosen if name in SECRETS)
    lines = [
        "# For `serve deploy`. Keys are not written here: set them in the environment of the nodes (MOTET_CLUSTER_KEY,",
        f"# MOTET_API_KEYS, ...){f'; left out: {secrets}' if secrets else ''}.",
        "proxy_location: EveryNode",
        "http_options:",
        f"  host: {_written(server.host)}",
        f"  port: {server.port}",
        "applications:",
        f"  - name: {_written(ray.app_name)}",
        '    route_prefix: "/"',
        f"    import_path: {IMPORT_PATH}",
        f"    args:{'' if args else ' {}'}",
        *(f"      {name}: {_written(value)}" for name, value in args.items()),
    ]
    return "\n".join(lines) + "\n"


def check_arguments(names: Iterable[str]) -> None:
    """That a config written by hand has settings of `motet ray` only. Raises ConfigError."""
    known = {name: name for name in RAY}
    for name in names:
        known_setting(name, shown=f"args: {name}", known=known)


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
