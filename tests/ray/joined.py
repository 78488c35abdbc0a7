"""What tests and the program that starts somebody else's cluster know of it; free of Ray."""

from dataclasses import dataclass
from pathlib import Path

NEAR, FAR = "near", "far"
"""Resources: one of the node that it has, the other of the second one that it may have."""
STRANGER, ANSWER = "/stranger", "still here"
"""Where an application of theirs is, and what it says."""


@dataclass(frozen=True)
class Joined:
    """A cluster that was there before, with Serve."""

    address: str
    port: int
    """That Serve listens on."""
    pid: int
    """Of who started it."""
    temporary: Path
