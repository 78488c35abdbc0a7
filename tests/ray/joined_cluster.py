"""Facts about an existing cluster, for tests and for the program that starts it. Does not import Ray."""

from dataclasses import dataclass
from pathlib import Path

FIRST, SECOND = "first", "second"
"""Resources that mark the nodes: the first one, and the second one that only some clusters have."""
OTHER_ROUTE, OTHER_ANSWER = "/other", "still running"
"""Route and answer of another application on the cluster."""


@dataclass(frozen=True)
class Joined:
    """A cluster on which Serve runs."""

    address: str
    port: int
    """Port at which Serve listens."""
    pid: int
    """The process that started the cluster."""
    temporary: Path
