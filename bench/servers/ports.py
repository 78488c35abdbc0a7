"""Finds a free port for a server whose port must be known before it starts."""

import contextlib
import random

from motet.deploy.listen import listen, port_of
from motet.errors import ConfigError

PORTS = (24_000, 32_000)
"""Range of the ports: below the ports that operating systems assign, above the ports of Ray's workers and of Motet's
side channels."""


def free_port() -> int:
    """Returns a free port. It stays free until the server starts, because no operating system assigns this range."""
    while True:
        with contextlib.suppress(ConfigError), listen("127.0.0.1", random.randrange(*PORTS)) as listener:
            return port_of(listener)
