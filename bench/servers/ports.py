"""Finds a port for a server that must be given one."""

import contextlib
import random

from motet.deploy.listen import listen, port_of
from motet.errors import ConfigError

OWN = (24_000, 32_000)
"""The ports to choose from: below those that systems assign themselves, above those of Ray's workers and of our side
channels."""


def free_port() -> int:
    """Returns a port that is free, and stays free until the server starts: no system assigns ports of this range."""
    while True:
        with contextlib.suppress(ConfigError), listen("127.0.0.1", random.randrange(*OWN)) as listener:
            return port_of(listener)
