"""Shows n answers side by side while they are generated. Without a terminal it prints them one after the other.

While answers are generated, they are on the terminal's alternate screen. Each refresh replaces all of it, so that a
window that changes its size breaks no lines. Then the answers are printed on the normal screen and stay there."""

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from motet.cli.conversation import Conversation, StreamedChoice
from motet.log import escaped

MIN_COLUMN = 32
REFRESH_PER_S = 12
BORDER_LINES = 2
OTHER_LINES = 2
"""Lines of the screen without answers: the title and the footer."""


def layout(answers: Sequence[StreamedChoice], *, width: int, height: int | None = None) -> RenderableType:
    """Lays out one panel per answer in as many columns as fit. With a `height`, panels show only their last lines."""
    columns = max(1, min(len(answers), width // MIN_COLUMN))
    rows = -(-len(answers) // columns)
    lines = None if height is None else max(1, height // rows - BORDER_LINES)
    table = Table.grid(expand=True, padding=0)
    for _ in range(columns):
        table.add_column(ratio=1)
    panels = [panel(i, answer, width=width // columns, lines=lines) for i, answer in enumerate(answers)]
    for row in range(rows):
        table.add_row(*panels[row * columns : (row + 1) * columns])
    return table


def panel(index: int, answer: StreamedChoice, *, width: int, lines: int | None) -> Panel:
    text = shown(answer)
    height = None
    if lines is not None:
        wrapped = text.wrap(Console(width=width), width - 4)
        text = Text("\n").join(wrapped[-lines:])
        height = lines + BORDER_LINES
    style = "green" if answer.finish_reason else "cyan"
    end = None if answer.finish_reason is None else Text(escaped(answer.finish_reason))
    return Panel(text, title=f"choice {index}", subtitle=end, height=height, border_style=style)


def shown(answer: StreamedChoice) -> Text:
    """Returns the answer's text, or the model's reasoning while there is no text. Control characters are escaped, so
    that neither can move a terminal's cursor."""
    text, reasoning = (escaped(text.strip(), keep="\n\t") for text in (answer.text, answer.reasoning))
    return Text(text) if text else Text(reasoning, style="dim")


def show(
    console: Console,
    conversation: Conversation,
    *,
    follow: Callable[[Conversation], None],
    title: str = "",
    footer: Callable[[], str] = str,
    keeps: bool = True,
) -> None:
    """Shows the answers of a conversation while `follow` reads them to their end, and leaves them on the screen if it
    `keeps` them. On a terminal an interrupted conversation stays too. `footer` returns the last line of the screen at
    each refresh."""
    if not console.is_terminal:
        follow(conversation)
        if keeps:
            print_one_by_one(console, conversation)
        return

    def render() -> RenderableType:  # called at each refresh of the screen, not at each token
        head, foot = (Text(escaped(text), style="dim", no_wrap=True, overflow="ellipsis") for text in (title, footer()))
        height = max(BORDER_LINES + 1, console.height - OTHER_LINES)
        return Group(head, layout(conversation.answers, width=console.width, height=height), foot)

    try:
        with Live(get_renderable=render, console=console, refresh_per_second=REFRESH_PER_S, screen=True):
            follow(conversation)
    finally:
        if keeps and conversation.started:
            console.print(layout(conversation.answers, width=console.width))


def print_one_by_one(console: Console, conversation: Conversation) -> None:
    for index, answer in enumerate(conversation.answers):
        console.print(escaped(f"--- choice {index} ({answer.finish_reason})"), highlight=False, markup=False)
        console.print(shown(answer), highlight=False, soft_wrap=True)


def activity(conversation: Conversation) -> str:
    """Returns what the user waits for."""
    ended = sum(answer.finish_reason is not None for answer in conversation.answers)
    return (
        f"{ended} of {len(conversation.answers)} answers have ended" if conversation.started else "waiting for a token"
    )


def speed(conversation: Conversation) -> str:
    """Returns the number of tokens of a finished conversation, and their speed."""
    if conversation.usage is None or not conversation.total_s:
        return "stopped"
    tokens, total_s = conversation.usage.completion_tokens, conversation.total_s
    first = "" if conversation.first_s is None else f", the first after {conversation.first_s:.2f} s"
    return f"{tokens} tokens in {total_s:.1f} s{first}: {tokens / total_s:.0f} tokens/s"
