"""`motet chat`: n answers side by side; the one you pick goes on."""

from contextlib import ExitStack
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.prompt import IntPrompt

from motet.cli.ask import Question, ask, connect
from motet.cli.conversation import Conversation
from motet.cli.side_by_side import show
from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL


def chat(  # sizes: one parameter a flag
    prompt: Annotated[
        str | None, typer.Argument(help="Asks this and ends; without it, a conversation.", show_default=False)
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server; without it, one is started.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="What a server that is started here serves.")] = DEFAULT_MODEL,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Answers to each question.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.8,
    seed: Annotated[int | None, typer.Option(help="Choice i has seed + i.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the running server.", show_default=False)] = None,
) -> None:
    """Ask, and watch n answers being written side by side."""
    console = Console()
    settings = Question([], n=n, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with ExitStack() as stack:
        if url is None:
            console.print(f"starting a server with {model} ...", style="dim")
            url = stack.enter_context(ChildServer([model])).url
        client = stack.enter_context(connect(url, api_key=api_key))
        talk = Talk(client, console, settings, system)
        if prompt is not None:
            talk.turn(prompt)
            return
        while question := read_question(console):
            talk.choose(talk.turn(question))


class Talk:
    """A conversation: what was said so far, and how the next answers are drawn."""

    def __init__(self, client: httpx.Client, console: Console, settings: Question, system: str | None) -> None:
        self._client = client
        self._console = console
        self._settings = settings
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def turn(self, question: str) -> Conversation:
        """Asks one question and shows its answers."""
        self._messages.append({"role": "user", "content": question})
        asked = Question(
            self._messages,
            n=self._settings.n,
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            seed=self._settings.seed,
        )
        return show(self._console, lambda on_change: ask(self._client, asked, on_change=on_change))

    def choose(self, conversation: Conversation) -> None:
        """Lets the user say which answer the conversation goes on with."""
        chosen = 0
        if len(conversation.answers) > 1:
            choices = [str(i) for i in range(len(conversation.answers))]
            chosen = IntPrompt.ask("go on with choice", choices=choices, default=0, console=self._console)
        self._messages.append({"role": "assistant", "content": conversation.answers[chosen].text})


def read_question(console: Console) -> str:
    """The next question; empty at the end of input."""
    try:
        return console.input("[bold]you[/bold] (empty line ends): ").strip()
    except EOFError:
        return ""
