"""`motet demo`: starts a cell, shows n answers to one prompt side by side, kills an engine while it generates them
again, and reports the cost.

The prompt is a short conversation, as its earlier answers keep a small model to the point. At this temperature, most
answers of the default model make sense and differ from each other."""

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from motet.cli.columns import activity, show
from motet.cli.conversation import ChatQuestion, Conversation, StreamedChoice, connect, stream_answers
from motet.cli.demo.engine_kill import EngineKill
from motet.cli.demo.receipt import Receipt, count
from motet.deploy.child import ChildServer, read_block_size, read_figures
from motet.errors import ConfigError
from motet.log import notice
from motet.models.model_source import resolve
from motet.models.progress_bars import terminal_progress
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

EARLIER = {
    "Give me three tips for a job interview.": (
        "1. Learn about the company before you go. Read its website and be ready to say why you want to work there.\n"
        "2. Prepare two short stories about problems that you have solved at work.\n"
        "3. Arrive ten minutes early, and switch off your phone before you go in."
    ),
    "Give me three tips for growing tomatoes at home.": (
        "1. Put the plants where they get at least six hours of sun a day.\n"
        "2. Water them in the morning, at the roots, and keep the leaves dry.\n"
        "3. Tie the stems to a stick, because ripe tomatoes are heavy."
    ),
    "Give me three tips for saving money.": (
        "1. Write down everything that you buy for a month. Most people are surprised by the small things.\n"
        "2. Move a fixed amount to a savings account on the day when you are paid.\n"
        "3. Cook at home, and take your lunch to work."
    ),
}
"""Questions with their answers, before the question of the demo."""
QUESTION = "Give me five tips for staying healthy."
TEMPERATURE = 0.4

CELL_CHOICES, SINGLE_CHOICES = 8, 4
NO_KILL = "No engine is killed: its answers would need a second decode engine (--decode 2) to continue."
NEXT_STEPS = {
    "serve": "the API and the page at http://127.0.0.1:8000",
    "chat -n 4": "a conversation in this terminal",
    "demo --model MODEL": "the same with another model: a folder or a hub name",
}


def demo(
    model: Annotated[str, typer.Option(help="Model to serve.")] = DEFAULT_MODEL,
    n: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--n",
            min=1,
            help=f"Number of choices (default {CELL_CHOICES}; {SINGLE_CHOICES} with --single).",
            show_default=False,
        ),
    ] = None,
    *,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a choice.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed; choice i uses seed + i.")] = 1,
    prefill: Annotated[
        int | None, typer.Option(min=1, help="Number of prefill engines (default 1).", show_default=False)
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(min=1, help="Number of decode engines (default 2; 1 with --no-kill).", show_default=False),
    ] = None,
    single: Annotated[bool, typer.Option("--single", help="Use one engine for prefill and decode.")] = False,
    kill: Annotated[
        bool, typer.Option("--kill/--no-kill", help="Kill one of several decode engines while it generates answers.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON on standard output, all else on standard error.")
    ] = False,
) -> None:
    """Start a server, send one prompt, watch n answers, kill an engine, and see the cost."""
    console = Console(stderr=as_json)
    progress = terminal_progress(notice)
    if single and (prefill or decode):
        raise ConfigError("--single starts one engine for both roles: omit --prefill and --decode")
    prefill, decode = prefill or 1, decode or (2 if kill else 1)
    can_kill = not single and decode > 1
    if kill and not can_kill:
        console.print(NO_KILL, highlight=False, markup=False, soft_wrap=True)
    folder = resolve(model, cache=cache_folder(environment()), progress=progress)
    n = n or (SINGLE_CHOICES if single else CELL_CHOICES)
    shape = [] if single else ["--prefill", str(prefill), "--decode", str(decode)]
    engines = "one engine" if single else f"{prefill} prefill and {count(decode, 'decode engine')}"
    messages = [message for pair in EARLIER.items() for message in zip(("user", "assistant"), pair, strict=True)]
    question = ChatQuestion(
        [{"role": role, "content": text} for role, text in [*messages, ("user", QUESTION)]],
        n=n,
        max_tokens=max_tokens,
        temperature=TEMPERATURE,
        seed=seed,
    )
    with ExitStack() as stack:
        with progress.stage(f"starting {engines} with {model}"):
            server = stack.enter_context(ChildServer([str(folder), "--served-model-name", model, *shape]))
        client = stack.enter_context(connect(server.url))
        figures = Demo(client, console, question=question).run(kills=kill and can_kill)
    console.print(next_steps(command_name(sys.argv[0])), highlight=False, markup=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(figures))


def next_steps(program: str) -> str:
    commands = [f"{program} {arguments}" for arguments in NEXT_STEPS]
    width = max(map(len, commands))
    lines = (f"  {c:<{width}}  {meaning}" for c, meaning in zip(commands, NEXT_STEPS.values(), strict=True))
    return "\n".join(["", "What next:", *lines])


def command_name(started_as: str) -> str:
    """Returns `motet` if the shell finds that command, and otherwise the path with which this program was started:
    `make demo` starts `.venv/bin/motet`."""
    return started_as if Path(started_as).stem == "motet" and shutil.which("motet") is None else "motet"


class Demo:
    """The requests of the demo, on a running server."""

    def __init__(self, client: httpx.Client, console: Console, *, question: ChatQuestion) -> None:
        self._client = client
        self._console = console
        self._question = question

    def run(self, *, kills: bool) -> dict[str, object]:
        """Shows the answers and their cost, and then the same answers with a kill. Returns the figures."""
        self._say(f"Question: {self._question.messages[-1]['content']}", style="bold")
        before, block = read_figures(self._client), read_block_size(self._client)
        conversation = Conversation(self._question.n)
        show(
            self._console,
            conversation,
            follow=partial(stream_answers, self._question, client=self._client),
            title=QUESTION,
            footer=lambda: activity(conversation),
        )
        receipt = Receipt.of(conversation, read_figures(self._client) - before, block=block)
        self._say("")
        for sentence in receipt.sentences():
            self._say(sentence)
        killed = self._kill(conversation.answers) if kills else None
        return {**receipt.figures(), "kill": killed}

    def _kill(self, expected: Sequence[StreamedChoice]) -> dict[str, object]:
        """Sends the same request again, and kills the engine that generates its answers."""
        conversation, kill = Conversation(self._question.n), EngineKill(expected, client=self._client)

        def footer() -> str:
            stage = f"{kill.worker} (process {kill.pid}) was killed" if kill.worker else "the same request again"
            return f"{stage}: {activity(conversation)}"

        def follow(conversation: Conversation) -> None:
            stream_answers(
                self._question, conversation, client=self._client, after_chunk=partial(kill.read, conversation)
            )

        show(self._console, conversation, follow=follow, title=QUESTION, footer=footer, keeps=False)
        self._say(kill.sentence(conversation.answers))
        return kill.figures(conversation.answers)

    def _say(self, text: str, *, style: str = "") -> None:
        wraps = not self._console.is_terminal
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=wraps)
