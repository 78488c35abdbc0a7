"""The settings with which llama.cpp's server is fastest on a CPU, and how it is asked.

It needs the model as GGUF in bf16, which llama.cpp's `convert_hf_to_gguf.py --outtype bf16` makes of a model's folder.

A slot of it writes one choice: n choices of a request take n slots, and the prompt is computed once. A request finds
the beginning of its prompt only in a slot that is free, so requests that come at once share nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.client.load import Load
from motet.settings.server_config import environment

IDLE = ("--cache-ram", "2048")
"""MiB for what slots had when they became free. It is moved there as soon as a request comes: attention would have to
pass over it in the KV cache."""


@dataclass(frozen=True)
class LlamaSetup:
    """`llama-server` with one KV cache for all slots; it batches continuously and keeps prompts by itself."""

    program: Path
    model: Path
    """A GGUF file."""
    slots: int
    context: int
    """Number of tokens for which all slots together have KV."""
    threads: int
    arguments: Sequence[str] = ()

    @property
    def name(self) -> str:
        return "llama-server"

    def command(self, port: int) -> list[str]:
        serve = [str(self.program), "--model", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        shape = ["--parallel", str(self.slots), "--kv-unified", "--ctx-size", str(self.context), *IDLE]
        return [*serve, *shape, "--threads", str(self.threads), "--metrics", *self.arguments]

    def environment(self) -> dict[str, str]:
        """Returns an environment in which the program finds the libraries beside it."""
        own = environment()
        found = [str(self.program.resolve().parent), *filter(None, [own.get("LD_LIBRARY_PATH")])]
        return {**own, "LD_LIBRARY_PATH": ":".join(found)}


def in_its_words(load: Load) -> Load:
    """Returns a load that asks `llama-server` for what other servers do by default: to draw from all tokens."""
    return replace(load, prepare=_with_all_tokens, answers_at="/completion", usage_of_each=True)


async def _with_all_tokens(body: dict[str, object]) -> dict[str, object]:
    return {**body, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "return_tokens": True}
