"""On which port the side channel of a replica listens: the first one of its role, and its rank."""

import errno
import socket

from motet.config import RayConfig
from motet.deploy.plan import SIDE_CHANNEL_PORTS
from motet.errors import PortTakenError
from motet.types import Role

TRIES = 64
"""Replicas that start while those of the same rank still end, and strangers."""


def side_channel_ports(role: Role, rank: int, ray: RayConfig, *, devices: int) -> range:
    """The port of this rank and those after it, each one step on; 0 alone where any free one will do."""
    first = {Role.PREFILL: ray.prefill_port, Role.DECODE: ray.decode_port}.get(role, SIDE_CHANNEL_PORTS[role])
    if first == 0:
        return range(1)
    wanted = first + rank * devices
    return range(wanted, min(wanted + TRIES, 2**16))


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there now; that one cannot for another reason, the engine says better."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True


def none_free(ports: range, host: str, role: Role) -> PortTakenError:
    return PortTakenError(
        f"--{role}-port: all ports from {ports.start} to {ports.stop - 1} are taken on {host}; give another first one"
    )
