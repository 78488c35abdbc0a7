"""`motet chat`: shows n answers side by side and continues with the one that the user picks. Without a terminal it
reads one question per line and prints the answers one after the other."""

import os
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from motet.cli.chat_commands import COMMANDS, ChatState, run_command
from motet.cli.columns import activity, show, speed
from motet.cli.conversation import (
    DEFAULT_TEMPERATURE,
    ChatQuestion,
    Conversation,
    check_server,
    connect,
    default_temperature,
    stream_answers,
)
from motet.deploy.child import ChildServer
from motet.errors import MotetError
from motet.log import escaped, failure, notice
from motet.models.model_source import resolve
from motet.models.progress_bars import terminal_progress
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

HISTORY = "chat_history"
"""File in the cache folder. Only its owner can read it."""


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Prompt to answer before the command exits. Without one, a conversation starts.", show_default=False
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a running server. Without one, a server is started.", show_default=False)
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Model of the server that is started (default {DEFAULT_MODEL}), or a model of the running one.",
            show_default=False,
        ),
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of answers to each prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 200,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=2.0,
            help=f"Sampling temperature (default: the model's own, or {DEFAULT_TEMPERATURE}).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; choice i uses seed + i.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the running server.", show_default=False)] = None,
) -> None:
    """Chat with a model and watch n answers being generated side by side."""
    console = Console()
    with ExitStack() as stack:
        if url is None:
            model = model or DEFAULT_MODEL
            folder = resolve(model, cache=cache_folder(environment()), progress=terminal_progress(notice))
            with terminal_progress(notice).stage(f"starting a server with {model}"):
                url = stack.enter_context(ChildServer([str(folder), "--served-model-name", model])).url
        client = stack.enter_context(connect(url, api_key=api_key))
        temperature = default_temperature(client, model) if temperature is None else temperature
        settings = ChatQuestion([], n=n, max_tokens=max_tokens, temperature=temperature, seed=seed, model=model)
        session = ChatSession(client, console, state=ChatState(settings, system))
        if prompt is not None:
            session.turn(prompt)
        elif console.is_terminal and sys.stdin.isatty():
            check_server(client)
            session.run(message_prompt(history_in(cache_folder(environment()))))
        else:
            session.read_lines()


class ChatSession:
    """A conversation on a terminal, or with lines of standard input."""

    def __init__(self, client: httpx.Client, console: Console, *, state: ChatState) -> None:
        self._client = client
        self._console = console
        self._state = state

    def turn(self, question: str) -> Conversation:
        """Sends one question and shows its answers."""
        conversation = self._start(question)
        self._follow(conversation)
        return conversation

    def _start(self, question: str) -> Conversation:
        self._state.add("user", question)
        return Conversation(self._state.settings.n)

    def _follow(self, conversation: Conversation) -> None:
        request = self._state.request
        show(
            self._console,
            conversation,
            follow=partial(stream_answers, request, client=self._client),
            title=self._state.turns[-1]["content"],
            footer=lambda: f"{activity(conversation)}; Ctrl-C stops",
        )

    def read_lines(self) -> None:
        """Takes each line of standard input as a question, and continues with its first answer."""
        for line in sys.stdin:
            if question := line.strip():
                self._state.add("assistant", self.turn(question).answers[0].text)

    def run(self, messages: "PromptSession[str]") -> None:
        """Reads messages and commands from the terminal until the user ends the chat."""
        with suppress(EOFError):
            while True:
                line = edited(messages, "you> ")
                if line.startswith("/"):
                    reply = escaped(run_command(line, self._state), keep="\n")
                    self._console.print(reply, style="dim", markup=False, highlight=False)
                elif line.strip():
                    self._answer(line.strip())

    def _answer(self, question: str) -> None:
        """Shows the answers to one question, and continues with one of them. Ctrl-C ends the answers and keeps what was
        generated. A question without an answer is not part of the conversation."""
        conversation = self._start(question)
        try:
            self._follow(conversation)
        except KeyboardInterrupt:
            pass
        except MotetError as error:
            failure(error.message)
        if conversation.started:
            self._console.print(speed(conversation), style="dim", highlight=False)
        texts = [answer.text for answer in conversation.answers]
        if any(texts):
            self._state.add("assistant", texts[self._chosen(len(texts))])
        else:
            self._state.turns.pop()

    def _chosen(self, n: int) -> int:
        """Returns the answer with which the conversation continues."""
        if n == 1:
            return 0
        prompt: PromptSession[str] = PromptSession()
        while True:
            text = edited(prompt, f"continue with choice (0 to {n - 1}, Enter: 0)> ").strip() or "0"
            if text.isdecimal() and int(text) < n:
                return int(text)


def message_prompt(history: History) -> "PromptSession[str]":
    """Returns a prompt with line editing: Enter sends the message, Alt-Enter starts a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=history,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="...> ",
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        enable_suspend=True,
        placeholder=HTML("<ansibrightblack>a message, or /help</ansibrightblack>"),
    )


def edited(prompt: "PromptSession[str]", text: str) -> str:
    """Reads one input. Ctrl-C clears it; Ctrl-D raises EOFError."""
    while True:
        with suppress(KeyboardInterrupt):
            return prompt.prompt(text)


def history_in(folder: Path) -> History:
    """Returns the history of messages, in a file that only its owner can read; in memory if it cannot be created."""
    file = folder / HISTORY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        file.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
