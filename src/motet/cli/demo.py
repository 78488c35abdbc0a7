"""`motet demo`: one server, one prompt, n answers side by side, and then what they cost."""

import json
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from motet.cli.ask import Question, ask, connect
from motet.cli.conversation import Conversation
from motet.cli.side_by_side import show
from motet.config import cache_folder, environment
from motet.deploy.child import ChildServer
from motet.deploy.figures import Figures, read_figures
from motet.errors import EngineError
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


@dataclass(frozen=True)
class Receipt:
    """What the answers cost, by the server's own counters."""

    n: int
    prompt_tokens: int
    prompt_tokens_prefilled: int
    completion_tokens: int
    blocks_shared: int
    bytes_not_copied: int
    first_token_s: float
    total_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, talk: Conversation, spent: Figures) -> "Receipt":
        if talk.usage is None or talk.total_s is None or talk.first_s is None:
            raise EngineError("the stream ended without a usage")
        return cls(
            n=len(talk.answers),
            prompt_tokens=talk.usage.prompt_tokens,
            prompt_tokens_prefilled=spent.prefill_tokens,
            completion_tokens=talk.usage.completion_tokens,
            blocks_shared=spent.blocks_shared,
            bytes_not_copied=spent.bytes_saved,
            first_token_s=round(talk.first_s, 3),
            total_s=round(talk.total_s, 3),
            tokens_per_s=round(talk.usage.completion_tokens / talk.total_s, 1),
        )

    def table(self) -> Table:
        table = Table("what it cost", "", box=None, pad_edge=False)
        table.add_row("prompt tokens", f"{self.prompt_tokens}, of which {self.prompt_tokens_prefilled} were computed")
        table.add_row("without sharing", f"{self.n * self.prompt_tokens} would have been")
        table.add_row("answer tokens", f"{self.completion_tokens} in {self.n} choices")
        table.add_row("KV blocks shared", f"{self.blocks_shared}")
        table.add_row("KV bytes not copied", f"{self.bytes_not_copied:,}")
        table.add_row("first token", f"{self.first_token_s} s")
        table.add_row("total", f"{self.total_s} s, {self.tokens_per_s} tokens/s")
        return table

    def json(self) -> str:
        return json.dumps(self.__dict__)


def demo(
    model: Annotated[str, typer.Option(help="Which model to show.")] = DEFAULT_MODEL,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Choices.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a choice.")] = 120,
    seed: Annotated[int, typer.Option(help="Choice i has seed + i.")] = 1,
) -> None:
    """Start a server, ask one question, watch n answers, and see what they cost. The last line is JSON."""
    console = Console()
    source = resolve(model, cache=cache_folder(environment()), say=say)
    console.print(f"starting a server with {model} ...", style="dim")
    with ChildServer([str(source.path), "--served-model-name", model]) as server, connect(server.url) as client:
        console.print(f"{server.url} answers; {n} choices of one prompt:", style="dim")
        before = read_figures(client)
        question = Question(
            [{"role": "user", "content": QUESTION}], n=n, max_tokens=max_tokens, temperature=0.8, seed=seed
        )
        talk = show(console, lambda on_change: ask(client, question, on_change=on_change))
        receipt = Receipt.of(talk, read_figures(client) - before)
    console.print(receipt.table())
    typer.echo(receipt.json())


def say(line: str) -> None:
    typer.echo(line, err=True)
