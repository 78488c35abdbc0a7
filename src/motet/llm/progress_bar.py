"""A progress bar on a terminal: prompts done, output tokens per second, time left."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from motet.llm.outputs import RequestOutput


class PromptProgress:
    """Shows how many of the prompts are done, while the context lasts, if standard error is a terminal."""

    def __init__(self, total: int, *, label: str = "prompts", console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=total, rate=0.0)
        self._started_s = time.monotonic()
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, output: RequestOutput) -> None:
        """Called with the complete output of each prompt, from any thread."""
        self._num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        rate = self._num_tokens / max(time.monotonic() - self._started_s, 1e-9)
        self._bar.update(self._task, advance=1, rate=rate)
