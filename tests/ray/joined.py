"""What tests and the program that starts somebody else's cluster know of it; free of Ray."""

from dataclasses import dataclass
from pathlib import Path

NEAR, FAR = "near", "far"
"""Resources that one of its two nodes has."""
ON_ONE_NODE = tuple(f"--resources-of={role}={NEAR}:1" for role in ("prefill", "decode", "gateway"))
"""Flags: the cell stays away from the other one."""
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
