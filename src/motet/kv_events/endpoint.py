"""Where a publisher is: an endpoint to subscribe to, and one port after it the endpoint that replays."""

from urllib.parse import urlsplit

from motet.errors import ConfigError


def tcp(host: str, port: int | str) -> str:
    """`port` may be `*`: any free one."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def port_of(endpoint: str) -> int:
    """Raises ConfigError for what is no `tcp://HOST:PORT`."""
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.scheme != "tcp" or not parts.hostname:
        raise ConfigError(f"block events: {endpoint!r} is no endpoint such as tcp://host:5557")
    return port


def replay_endpoint(endpoint: str) -> str:
    """Where the publisher at `endpoint` replays, if it is one of ours."""
    port = port_of(endpoint)
    return f"{endpoint.rpartition(':')[0]}:{port + 1}"
