"""`motet demo`: starts a cell, shows n answers to one prompt side by side, and then their cost."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from motet.cli.columns import show
from motet.cli.conversation import ChatQuestion, Conversation, CountedUsage, connect, stream_answers
from motet.cli.progress import terminal_progress
from motet.deploy.child import BlockSize, ChildServer, CounterSnapshot, read_block_size, read_figures
from motet.errors import EngineError
from motet.log import notice
from motet.models.model_source import resolve
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

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
    prefill: Annotated[int, typer.Option(min=1, help="Number of prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode engines.")] = 1,
    single: Annotated[bool, typer.Option("--single", help="Use one engine for prefill and decode.")] = False,
) -> None:
    """Start a server, send one prompt, watch n answers, and see their cost. The last line is JSON."""
    console = Console()
    folder = resolve(model, cache=cache_folder(environment()), progress=terminal_progress(notice))
    n = n or (SINGLE_CHOICES if single else CELL_CHOICES)
    shape = [] if single else ["--prefill", str(prefill), "--decode", str(decode)]
    what = "one engine" if single else f"{prefill} prefill and {decode} decode"
    console.print(f"starting a server with {model}: {what} ...", style="dim")
    arguments = [str(folder), "--served-model-name", model, *shape]
    with ChildServer(arguments) as server, connect(server.url) as client:
        console.print(f"{server.url} is ready; {n} choices of one prompt:", style="dim")
        before, block = read_figures(client), read_block_size(client)
        question = ChatQuestion(
            [{"role": "user", "content": QUESTION}], n=n, max_tokens=max_tokens, temperature=0.8, seed=seed
        )
        conversation = Conversation(n)
        show(console, conversation, follow=partial(stream_answers, question, client=client))
        receipt = Receipt.of(conversation, read_figures(client) - before, block=block)
    console.print(receipt.table())
    typer.echo(receipt.json())


@dataclass(frozen=True)
class Receipt:
    """The cost of one request with n choices: the workers' counters, and the client's times."""

    n: int
    usage: CountedUsage
    first_token_s: float
    total_s: float
    spent: CounterSnapshot
    trunk_bytes: int
    """KV bytes of the prompt except its last token, which the decode worker computes: the minimum to transfer."""

    @classmethod
    def of(cls, answers: Conversation, spent: CounterSnapshot, *, block: BlockSize) -> "Receipt":
        if answers.usage is None or answers.total_s is None or answers.first_s is None:
            raise EngineError("the stream ended without usage")
        trunk_bytes = block.bytes_of(answers.usage.prompt_tokens - 1)
        first_s, total_s = round(answers.first_s, 3), round(answers.total_s, 3)
        return cls(len(answers.answers), answers.usage, first_s, total_s, spent, trunk_bytes)

    @property
    def tokens_per_s(self) -> float:
        return round(self.usage.completion_tokens / self.total_s, 1)

    def table(self) -> Table:
        table = Table("cost", "", "instead of", box=None, pad_edge=False)
        n, prompt, spent = self.n, self.usage.prompt_tokens, self.spent
        if spent.prefills:  # disaggregated: the last column has the cost of n choices in other systems
            table.add_row("prefills", f"{spent.prefills}", f"{n}, one for each choice")
            table.add_row("KV transfers", f"{spent.kv_transfers}", f"{n}, one for each choice")
            table.add_row("KV bytes transferred", f"{spent.kv_transfer_bytes:,}", f"{n * self.trunk_bytes:,}")
            table.add_row("KV bytes of the prompt", f"{self.trunk_bytes:,}")
            table.add_row("prompt tokens computed by decode", f"{spent.recomputed_tokens}", f"{n}, one for each choice")
        table.add_row("prompt tokens computed", f"{spent.prefill_tokens} of {prompt}", f"{n * prompt}")
        table.add_row("output tokens", f"{self.usage.completion_tokens} in {n} choices")
        drafts, accepted = spent.spec_decode_num_draft_tokens, spent.spec_decode_num_accepted_tokens
        table.add_row("draft tokens accepted", f"{accepted} of {drafts}")
        table.add_row("KV blocks shared", f"{spent.blocks_shared}")
        table.add_row("KV bytes not copied", f"{spent.bytes_saved:,}")
        table.add_row("first token", f"{self.first_token_s} s")
        table.add_row("total", f"{self.total_s} s, {self.tokens_per_s} tokens/s")
        return table

    def json(self) -> str:
        spent = self.spent
        figures = {
            "n": self.n,
            "prefills": spent.prefills,
            "transfers": spent.kv_transfers,
            "transfer_bytes": spent.kv_transfer_bytes,
            "trunk_bytes": self.trunk_bytes,
            "recomputed_tokens": spent.recomputed_tokens,
            "prompt_tokens": self.usage.prompt_tokens,
            "prompt_tokens_prefilled": spent.prefill_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "forced_tokens": spent.forced_tokens,
            "draft_tokens": spent.spec_decode_num_draft_tokens,
            "accepted_tokens": spent.spec_decode_num_accepted_tokens,
            "blocks_shared": spent.blocks_shared,
            "bytes_not_copied": spent.bytes_saved,
            "first_token_s": self.first_token_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
        }
        return json.dumps(figures)
