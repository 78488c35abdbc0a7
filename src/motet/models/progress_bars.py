"""Shows slow stages on standard error: bars and spinners on a terminal, lines elsewhere."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from motet.log import escaped
from motet.models.progress import Lines, Progress, Say


def terminal_progress(say: Say) -> Progress:
    """Returns bars if standard error is a terminal, else lines that `say` prints."""
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal else Lines(say)


class Bars:
    """One bar or spinner for each stage. The bar of a download stays on the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        self._console.print(escaped(line), style="dim", markup=False, highlight=False)

    @contextlib.contextmanager
    def stage(self, label: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
        text = TextColumn("{task.description}", markup=False)
        sizes: tuple[ProgressColumn, ...] = (BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn())
        columns = (text, *sizes) if total_bytes else (SpinnerColumn(), text, TimeElapsedColumn())
        with Bar(*columns, console=self._console, transient=total_bytes is None) as bar:
            task = bar.add_task(escaped(label), total=total_bytes)

            def report(done_bytes: int) -> None:
                if total_bytes:
                    bar.update(task, completed=min(done_bytes, total_bytes))

            yield report
            if total_bytes:
                bar.update(task, completed=total_bytes)
