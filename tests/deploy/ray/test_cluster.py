"""What is known before a cluster is started. Apart from the rest, for it imports Ray."""

import socket

import pytest

from motet.errors import ConfigError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),  # Ray's, of pydantic
]


def test_a_port_that_is_taken_is_known_before_anything_is_started() -> None:
    """Serve tried for a minute to listen there, and then showed a traceback."""
    from motet.deploy.ray.cluster import LOCAL, connected  # here: it takes seconds, also where it is not selected

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"--port {port}: another program listens there"),
            connected(LOCAL, host="127.0.0.1", port=port, cpus=1),
        ):
            pass
