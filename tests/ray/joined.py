"""Facts about somebody else's cluster, for tests and for the program that starts it; free of Ray."""

from dataclasses import dataclass
from pathlib import Path

NEAR, FAR = "near", "far"
"""Resources that mark the nodes: the first one, and a second one that only some clusters have."""
STRANGER, ANSWER = "/stranger", "still here"
"""The route of their application, and what it answers."""


@dataclass(frozen=True)
class Joined:
    """A cluster with Serve that was there before."""

    address: str
    port: int
    """The port at which Serve listens."""
    pid: int
    """The process that started the cluster."""
    temporary: Path
