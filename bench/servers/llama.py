"""The flags with which llama.cpp's server is fastest on a CPU, and the requests that it needs.

llama.cpp needs the model as GGUF in bf16, which its script `convert_hf_to_gguf.py --outtype bf16` makes from the folder
of a model.

A slot generates one choice: n choices of a request take n slots, and the prompt is computed once. A request reuses a
cached prefix of its prompt only from a slot that is free, so requests that arrive at once share nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.client.load import TimedLoad
from motet.settings.server_config import environment

IDLE = ("--cache-ram", "2048")
"""Size in MiB of the cache for the prompts of free slots. A prompt is moved there from the KV cache when the next
request arrives; in the KV cache, attention would have to skip it."""


@dataclass(frozen=True)
class LlamaSetup:
    """`llama-server` with one KV cache for all slots. It batches continuously and caches prompts."""

    program: Path
    model: Path
    """A GGUF file."""
    slots: int
    context: int
    """Number of tokens in the KV cache of all slots together."""
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
        """Returns an environment in which the program finds the libraries next to it."""
        own = environment()
        found = [str(self.program.resolve().parent), *filter(None, [own.get("LD_LIBRARY_PATH")])]
        return {**own, "LD_LIBRARY_PATH": ":".join(found)}


def for_llama(load: TimedLoad) -> TimedLoad:
    """Returns a load that requests from `llama-server` the default of other servers: to sample from all tokens."""
    return replace(load, prepare=_with_all_tokens, answers_at="/completion", usage_per_choice=True)


async def _with_all_tokens(body: dict[str, object]) -> dict[str, object]:
    return {**body, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "return_tokens": True}
