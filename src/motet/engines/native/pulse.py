"""Whether an engine process still lives, judged by what is heard of it. Pure: told what happens, asked at intervals."""

import time
from collections.abc import Callable
from dataclasses import dataclass

BEAT_S = 0.5
"""Between two beats, and between two looks."""
BEATS_A_TIMEOUT = 4
"""So many at least, however short a silence is borne."""


def beat_every_s(silence_s: float) -> float:
    return min(BEAT_S, silence_s / BEATS_A_TIMEOUT)


@dataclass(frozen=True)
class Patience:
    """How long an engine process may say nothing, and how long it may be in one step."""

    silence_s: float
    step_s: float


class Pulse:
    """`heard` at every event of the process; `look` every `look_every_s`.

    A silence counts only if it was listened to: where a look comes late, this process was itself stopped or too busy to
    read what has come meanwhile, and its patience begins anew.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self.look_every_s = beat_every_s(patience.silence_s)
        self._patience = patience
        self._clock = clock
        self._heard_s = self._looked_s = clock()
        self._busy_s = 0.0

    def heard(self, busy_s: float = 0.0) -> None:
        """The process gave a sign of life, and has been in its present step for `busy_s`."""
        self._heard_s = self._clock()
        self._busy_s = busy_s

    def look(self) -> str | None:
        """What is wrong with the process, if anything is."""
        now_s = self._clock()
        if now_s - self._looked_s > 2 * self.look_every_s:
            self._heard_s = now_s
        self._looked_s = now_s
        if self._busy_s > self._patience.step_s:
            return f"has been in one step for {self._busy_s:.1f} s"
        if now_s - self._heard_s > self._patience.silence_s:
            return f"has given no sign of life for {now_s - self._heard_s:.1f} s"
        return None
