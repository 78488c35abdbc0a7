"""`motet chat`: shows n answers side by side and goes on with the one you pick; without a terminal, one by one."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.prompt import IntPrompt
from rich.table import Table
from rich.text import Text

from motet.cli.conversation import ChatQuestion, Conversation, StreamedChoice, ask, connect
from motet.deploy.child import ChildServer
from motet.log import escaped
from motet.models.smollm2 import DEFAULT_MODEL

MIN_COLUMN = 32
REFRESH_PER_S = 12
BORDER_LINES = 2


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="Asks this and ends; without it, a conversation.", show_default=False)
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server; without it, one is started.", show_default=False)
    ] = None,
    *,
    model: Annotated[str, typer.Option(help="The model of a server that is started here.")] = DEFAULT_MODEL,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Answers to each question.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.8,
    seed: Annotated[int | None, typer.Option(help="Choice i has seed + i.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the running server.", show_default=False)] = None,
) -> None:
    """Ask, and watch n answers being written side by side."""
    console = Console()
    settings = ChatQuestion([], n=n, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with ExitStack() as stack:
        if url is None:
            console.print(f"starting a server with {model} ...", style="dim")
            url = stack.enter_context(ChildServer([model])).url
        client = stack.enter_context(connect(url, api_key=api_key))
        talk = ChatSession(client, console, settings=settings, system=system)
        if prompt is not None:
            talk.turn(prompt)
            return
        with suppress(EOFError):  # the end of the input is the end of the conversation
            while question := console.input("[bold]you[/bold] (empty line ends): ").strip():
                talk.choose(talk.turn(question))


class ChatSession:
    """A conversation: the messages so far, and the settings of the next answers."""

    def __init__(self, client: httpx.Client, console: Console, *, settings: ChatQuestion, system: str | None) -> None:
        self._client = client
        self._console = console
        self._settings = settings
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def turn(self, question: str) -> Conversation:
        """Asks one question and shows its answers."""
        self._messages.append({"role": "user", "content": question})
        asked = replace(self._settings, messages=self._messages)
        return show(self._console, asked.n, follow=partial(ask, asked, client=self._client))

    def choose(self, conversation: Conversation) -> None:
        """Lets the user choose the answer with which the conversation goes on."""
        chosen = 0
        if len(conversation.answers) > 1:
            choices = [str(i) for i in range(len(conversation.answers))]
            chosen = IntPrompt.ask("go on with choice", choices=choices, default=0, console=self._console)
        self._messages.append({"role": "assistant", "content": conversation.answers[chosen].text})


def layout(answers: Sequence[StreamedChoice], *, width: int, height: int | None = None) -> RenderableType:
    """Lays out panels in as many columns as fit. With a `height`, each shows only its last lines, so that all fit."""
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
    """Returns the answer's text, or the model's thoughts while there is none; neither may move a terminal's cursor."""
    said, thought = (escaped(text.strip(), keep="\n\t") for text in (answer.text, answer.thought))
    return Text(said) if said else Text(thought, style="dim")


def show(console: Console, n: int, *, follow: Callable[[Conversation], None]) -> Conversation:
    """Draws n answers while `follow` reads them to their end, and leaves them on the screen."""
    talk = Conversation(n)
    if console.is_terminal:

        def drawn() -> RenderableType:  # called when the screen is drawn, not at every token
            return layout(talk.answers, width=console.width, height=console.height - 1)

        with Live(get_renderable=drawn, console=console, refresh_per_second=REFRESH_PER_S, transient=True):
            follow(talk)
        console.print(layout(talk.answers, width=console.width))
    else:
        follow(talk)
        for index, answer in enumerate(talk.answers):
            console.print(escaped(f"--- choice {index} ({answer.finish_reason})"), highlight=False, markup=False)
            console.print(shown(answer), highlight=False, soft_wrap=True)
    return talk
