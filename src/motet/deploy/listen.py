"""The socket a server listens on, bound before anything slow is started: a taken port is known at once."""

import errno
import socket

from motet.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket; port 0 takes a free one. Raises `ConfigError` naming the flag to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as exc:
        raise ConfigError(f"--host {host}: no such host: {exc.strerror}") from exc
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection: without it a burst of small writes waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(explain(exc, host, port)) from exc
    return listener


def explain(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"--port {port}: another program listens there; choose another port, or 0 for a free one"
        case errno.EACCES:
            return f"--port {port}: this user may not listen on port {port}; choose one above 1023"
        case errno.EADDRNOTAVAIL:
            return f"--host {host}: this machine has no such address"
        case _:
            return f"--host {host} --port {port}: {error.strerror}"


def port_of(listener: socket.socket) -> int:
    """The port in fact, where 0 was asked for."""
    port: int = listener.getsockname()[1]
    return port


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    return url_at(listener.getsockname()[0], port_of(listener))


def url_at(host: str, port: int) -> str:
    """Where a client on this machine finds who listens there."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
