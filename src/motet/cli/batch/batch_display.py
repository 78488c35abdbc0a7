"""The progress of a batch on standard error: a bar on a terminal, a line every ten seconds elsewhere."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from motet.batch.run import BatchProgress
from motet.log import notice

BAR_INTERVAL_S = 0.5
LINE_INTERVAL_S = 10.0
RATE_WINDOW_S = 60.0
"""Time over which rates are measured."""


@dataclass(frozen=True)
class _ProgressSample:
    time_s: float
    num_lines: int
    num_tokens: int


class RateMeter:
    """The rates of the last minute."""

    def __init__(self, progress: BatchProgress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._clock = clock
        self._samples = deque([self._sample()])

    def measure(self) -> "BatchRates":
        now = self._sample()
        self._samples.append(now)
        while len(self._samples) > 2 and now.time_s - self._samples[0].time_s > RATE_WINDOW_S:
            self._samples.popleft()
        first = self._samples[0]
        elapsed_s = max(now.time_s - first.time_s, 1e-3)
        lines = (now.num_lines - first.num_lines) / elapsed_s
        left_s = self._progress.num_left / lines if lines else None
        return BatchRates(lines, (now.num_tokens - first.num_tokens) / elapsed_s, left_s)

    def _sample(self) -> _ProgressSample:
        progress = self._progress
        return _ProgressSample(self._clock(), progress.num_completed + progress.num_failed, progress.num_tokens)


@dataclass(frozen=True)
class BatchRates:
    requests_per_s: float
    tokens_per_s: float
    left_s: float | None
    """Estimated time to the end; None if nothing has finished in the last minute."""

    def text(self, progress: BatchProgress) -> str:
        """Returns progress and rates in one line, short enough for a bar and 80 columns."""
        left = "" if self.left_s is None else f", {duration(self.left_s)} left"
        failed = f", {progress.num_failed:,} failed" if progress.num_failed else ""
        return (
            f"{progress.num_done:,} of {progress.num_lines:,}: {self.requests_per_s:,.1f}/s, "
            f"{self.tokens_per_s:,.0f} tokens/s{left}{failed}"
        )


def duration(seconds: float) -> str:
    """Returns a time as `12 s`, `3:04` minutes or `2:03:04` hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


async def show_progress(progress: BatchProgress) -> None:
    """Shows the progress until the task is cancelled."""
    meter, console = RateMeter(progress), Console(stderr=True)
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_INTERVAL_S)
            notice(f"{meter.measure().text(progress)}, {progress.num_in_progress} in progress")
    with Bar(BarColumn(bar_width=10), TextColumn("{task.description}", markup=False), console=console) as bar:
        task: TaskID = bar.add_task("", total=progress.num_lines)
        while True:
            bar.update(task, completed=progress.num_done, description=meter.measure().text(progress))
            await asyncio.sleep(BAR_INTERVAL_S)
