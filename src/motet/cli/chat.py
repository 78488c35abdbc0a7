"""`motet chat`: shows n answers side by side and continues with the one that the user picks. Without a terminal it
prints the answers one after the other."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated

import httpx
import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.prompt import IntPrompt
from rich.table import Table
from rich.text import Text

from motet.cli.conversation import ChatQuestion, Conversation, StreamedChoice, connect, stream_answers
from motet.deploy.child import ChildServer
from motet.log import escaped
from motet.models.smollm2 import DEFAULT_MODEL

MIN_COLUMN = 32
REFRESH_PER_S = 12
BORDER_LINES = 2


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Send one prompt and exit; starts a conversation without it.", show_default=False),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a running server; starts one without it.", show_default=False)
    ] = None,
    *,
    model: Annotated[str, typer.Option(help="Model of the server that is started.")] = DEFAULT_MODEL,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of answers to each prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.8,
    seed: Annotated[int | None, typer.Option(help="Seed; choice i uses seed + i.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the running server.", show_default=False)] = None,
) -> None:
    """Chat with a model and watch n answers being generated side by side."""
    console = Console()
    settings = ChatQuestion([], n=n, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with ExitStack() as stack:
        if url is None:
            console.print(f"starting a server with {model} ...", style="dim")
            url = stack.enter_context(ChildServer([model])).url
        client = stack.enter_context(connect(url, api_key=api_key))
        session = ChatSession(client, console, settings=settings, system=system)
        if prompt is not None:
            session.turn(prompt)
            return
        with suppress(EOFError):  # the end of the input ends the conversation
            while question := console.input("[bold]you[/bold] (empty line ends): ").strip():
                session.choose(session.turn(question))


class ChatSession:
    """A conversation: the messages so far, and the settings of the next answers."""

    def __init__(self, client: httpx.Client, console: Console, *, settings: ChatQuestion, system: str | None) -> None:
        self._client = client
        self._console = console
        self._settings = settings
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def turn(self, question: str) -> Conversation:
        """Sends one question and shows its answers."""
        self._messages.append({"role": "user", "content": question})
        request = replace(self._settings, messages=self._messages)
        return show(self._console, request.n, follow=partial(stream_answers, request, client=self._client))

    def choose(self, conversation: Conversation) -> None:
        """Lets the user choose the answer with which the conversation continues."""
        chosen = 0
        if len(conversation.answers) > 1:
            choices = [str(i) for i in range(len(conversation.answers))]
            chosen = IntPrompt.ask("continue with choice", choices=choices, default=0, console=self._console)
        self._messages.append({"role": "assistant", "content": conversation.answers[chosen].text})


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


def show(console: Console, n: int, *, follow: Callable[[Conversation], None]) -> Conversation:
    """Shows n answers while `follow` reads them to their end, and leaves them on the screen."""
    conversation = Conversation(n)
    if console.is_terminal:

        def render() -> RenderableType:  # called at each refresh of the screen, not at each token
            return layout(conversation.answers, width=console.width, height=console.height - 1)

        with Live(get_renderable=render, console=console, refresh_per_second=REFRESH_PER_S, transient=True):
            follow(conversation)
        console.print(layout(conversation.answers, width=console.width))
    else:
        follow(conversation)
        for index, answer in enumerate(conversation.answers):
            console.print(escaped(f"--- choice {index} ({answer.finish_reason})"), highlight=False, markup=False)
            console.print(shown(answer), highlight=False, soft_wrap=True)
    return conversation
