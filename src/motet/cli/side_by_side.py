"""Shows the answers of one question side by side as they are written; without a terminal, one after the other."""

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from motet.cli.conversation import Answer, Conversation

OnChange = Callable[[Conversation], None]

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
    text = shown(answer)
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


def shown(answer: Answer) -> Text:
    """What is said, once something is; what is thought, until then."""
    said = answer.text.strip()
    return Text(said) if said else Text(answer.thought.strip(), style="dim")


class LiveView:
    """The latest state of a conversation, laid out when the screen is drawn and not at every token."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._talk: Conversation | None = None

    def update(self, talk: Conversation) -> None:
        self._talk = talk

    def __rich__(self) -> RenderableType:
        if self._talk is None:
            return ""
        return layout(self._talk.answers, width=self._console.width, height=self._console.height - 1)


def show(console: Console, follow: Callable[[OnChange], Conversation]) -> Conversation:
    """Runs `follow` to its end, drawing what it reports, and leaves the finished answers on the screen."""
    if not console.is_terminal:
        talk = follow(ignore)
        print_in_turn(console, talk.answers)
        return talk
    view = LiveView(console)
    with Live(view, console=console, refresh_per_second=REFRESH_PER_S, transient=True):
        talk = follow(view.update)
    console.print(layout(talk.answers, width=console.width))
    return talk


def ignore(talk: Conversation) -> None:
    """For an output that cannot be drawn over."""


def print_in_turn(console: Console, answers: Sequence[Answer]) -> None:
    for index, answer in enumerate(answers):
        console.print(f"--- choice {index} ({answer.finish_reason})", highlight=False)
        console.print(shown(answer), highlight=False, soft_wrap=True)
