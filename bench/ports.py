"""A port for a server that is told which one to take."""

import contextlib
import random

from motet.deploy.listen import listen, port_of
from motet.errors import ConfigError

OWN = (24_000, 32_000)
"""Below those that systems hand out by themselves, above those of Ray's workers and of our side channels."""


def free_port() -> int:
    """Taken seconds later, and still free then: nobody is given it who asks for any."""
    while True:
        with contextlib.suppress(ConfigError), listen("127.0.0.1", random.randrange(*OWN)) as listener:
            return port_of(listener)
