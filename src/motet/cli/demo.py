"""`motet demo`: a cell of prefill and decode, one prompt, n answers side by side, and then what they cost."""

from typing import Annotated

import typer
from rich.console import Console

from motet.cli.ask import Question, ask, connect
from motet.cli.receipt import Receipt
from motet.cli.side_by_side import show
from motet.config import cache_folder, environment
from motet.deploy.child import ChildServer
from motet.deploy.figures import read_block_size, read_figures
from motet.models import resolve
from motet.models.smollm2 import DEFAULT_MODEL

SCENE = """\
The lighthouse keeper had lived alone on the island for eleven years. Every evening she climbed the hundred and twelve \
steps, trimmed the lamp, and wrote one line in the log: the wind, the weather, the ships. Nothing else was ever worth \
a line. The supply boat came on the first Monday of the month with flour, oil, newspapers that were already old, and \
the same sailor, who never spoke. In the winter the boat could not land at all, and she counted the days on the door \
of the pantry with a piece of chalk. She was not unhappy. She knew the birds by their voices and the currents by their \
colours, and she had read every book on the shelf so often that she could begin any of them at any page and go on \
with her eyes closed. Then, on a night without wind in the middle of November, when the sea lay flat and black and \
the lamp drew its slow circle over nothing, she saw something that she had never seen in eleven years: far out, \
where the charts showed only deep water, a second light was turning. She set down the pen, went out onto the \
gallery, and began to count the seconds between its flashes."""
QUESTION = f"{SCENE}\n\nWhat do you think the second light is? Answer in two or three sentences."

CELL_CHOICES, SINGLE_CHOICES = 8, 4


def demo(  # sizes: one parameter a flag
    model: Annotated[str, typer.Option(help="Which model to show.")] = DEFAULT_MODEL,
    n: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--n",
            min=1,
            help=f"Choices (default {CELL_CHOICES}; {SINGLE_CHOICES} with --single).",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a choice.")] = 120,
    seed: Annotated[int, typer.Option(help="Choice i has seed + i.")] = 1,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode engines.")] = 1,
    single: Annotated[bool, typer.Option("--single", help="One engine that does it all.")] = False,
) -> None:
    """Start a server, ask one question, watch n answers, and see what they cost. The last line is JSON."""
    console = Console()
    source = resolve(model, cache=cache_folder(environment()), say=say)
    n = n or (SINGLE_CHOICES if single else CELL_CHOICES)
    shape = [] if single else ["--prefill", str(prefill), "--decode", str(decode)]
    what = "one engine" if single else f"{prefill} prefill and {decode} decode"
    console.print(f"starting a server with {model}: {what} ...", style="dim")
    arguments = [str(source.path), "--served-model-name", model, *shape]
    with ChildServer(arguments) as server, connect(server.url) as client:
        console.print(f"{server.url} answers; {n} choices of one prompt:", style="dim")
        before, block = read_figures(client), read_block_size(client)
        question = Question(
            [{"role": "user", "content": QUESTION}], n=n, max_tokens=max_tokens, temperature=0.8, seed=seed
        )
        talk = show(console, lambda on_change: ask(client, question, on_change=on_change))
        receipt = Receipt.of(talk, read_figures(client) - before, block)
    console.print(receipt.table())
    typer.echo(receipt.json())


def say(line: str) -> None:
    typer.echo(line, err=True)
