"""Shows the answers of one question side by side as they are written; without a terminal, one after the other."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from motet.cli.conversation import Answer, Conversation

MIN_COLUMN = 32
REFRESH_PER_S = 12
BORDER_LINES = 2


def layout(answers: Sequence[Answer], *, width: int, height: int | None = None) -> RenderableType:
    """Panels in as many columns as fit. With a `height`, each shows its last lines only, so that the whole fits."""
    columns = max(1, min(len(answers), width // MIN_COLUMN))
    rows = -(-len(answers) // columns)
    lines = None if height is None else max(1, height // rows - BORDER_LINES)
    table = Table.grid(expand=True, padding=0)
    for _ in range(columns):
        table.add_column(ratio=1)
    panels = [panel(i, answer, width=width // columns, lines=lines) for i, answer in enumerate(answers)]
    for row in range(rows):
        table.add_row(*panels[row * columns : (row + 1) * columns])
    return Group(table)


def panel(index: int, answer: Answer, *, width: int, lines: int | None) -> Panel:
    text = Text(answer.text.strip())
    height = None
    if lines is not None:
        wrapped = text.wrap(Console(width=width), width - 4)
        text = Text("\n").join(wrapped[-lines:])
        height = lines + BORDER_LINES
    ended = answer.finish_reason is not None
    return Panel(
        text,
        title=f"choice {index}",
        subtitle=answer.finish_reason,
        height=height,
        border_style="green" if ended else "cyan",
    )


@contextmanager
def showing(console: Console) -> Iterator[Callable[[Conversation], None]]:
    """Gives the function to call at every change; leaves the finished answers on the screen."""
    if not console.is_terminal:
        last: list[Conversation] = []

        def remember(talk: Conversation) -> None:
            last[:] = [talk]

        yield remember
        for talk in last:
            print_in_turn(console, talk.answers)
        return
    with Live(console=console, refresh_per_second=REFRESH_PER_S, transient=True) as live:
        shown: list[Conversation] = []

        def show(talk: Conversation) -> None:
            shown[:] = [talk]
            live.update(layout(talk.answers, width=console.width, height=console.height - 1))

        yield show
    for talk in shown:
        console.print(layout(talk.answers, width=console.width))


def print_in_turn(console: Console, answers: Sequence[Answer]) -> None:
    for index, answer in enumerate(answers):
        console.print(f"--- choice {index} ({answer.finish_reason})", highlight=False)
        console.print(answer.text.strip(), highlight=False, markup=False, soft_wrap=True)
