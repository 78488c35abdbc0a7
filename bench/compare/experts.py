"""Compares the compiled kernels with torch's operators, and with vLLM, for a mixture of experts with random weights.

The model is a Qwen3-MoE that is made in a temporary folder, with the tokenizer of the default model: by default 0.9
billion parameters in bfloat16. A token uses 0.2 billion of them. All servers run the same requests in turns: n choices
of a prompt that is not cached, at temperature 1. "prefill" is the number of prompt tokens divided by the time of the
first token. The ratios compare the compiled kernels with each other server. Prints a table, and JSON on the last line.

Run: python -m bench.compare.experts [--ns 1,8,32] [--repeats 2] [--vllm VENV_WITH_VLLM] [--layers 16] [--experts 32]
"""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import LoadSetup, Timing, load_parser
from bench.program.command_line import progress
from bench.program.report import Cells, machine, print_report, table
from bench.servers.compared_server import RequestStyle, connect_server, median_sample
from bench.servers.motet_server import motet_server
from bench.servers.peer_server import all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment

COMPILED, TORCH = "compiled", "torch"
PER_TOKEN = 4
"""Number of experts of a token."""
MIB = 2**20


@dataclass(frozen=True)
class ExpertsRow:
    """The times of each server for one n."""

    n: int
    prompt_tokens: int
    timings: Mapping[str, Timing]

    def cells(self) -> Cells:
        first = self.timings[COMPILED]
        cells: list[tuple[str, object, str]] = [("n", self.n, "")]
        for name, timing in self.timings.items():
            cells.append((f"{name} tokens/s", timing.decode_tokens_per_s, ".1f"))
            cells.append((f"{name} prefill", self.prompt_tokens / timing.first_s, ".0f"))
            if name != COMPILED:
                cells.append((f"/ {name}", first.decode_tokens_per_s / timing.decode_tokens_per_s, ".2f"))
                cells.append((f"prefill / {name}", timing.first_s / first.first_s, ".2f"))
        return cells

    def record(self) -> dict[str, object]:
        return {"n": self.n, **{name: asdict(timing) for name, timing in self.timings.items()}}


def save_model(folder: Path, *, layers: int, experts: int, tokenizer: Path) -> dict[str, str]:
    """Writes the model. Returns its sizes in words."""
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, folder)
    original = json.loads((tokenizer / "config.json").read_text())
    config = Qwen3MoeConfig(
        vocab_size=original["vocab_size"],
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        moe_intermediate_size=512,
        num_experts=experts,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=original["bos_token_id"],
        eos_token_id=original["eos_token_id"],
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    parameters = list(model.parameters())
    of_experts = sum(one.numel() for one in parameters if one.dim() == 3)
    total = sum(one.numel() for one in parameters)
    active = total - of_experts + of_experts * PER_TOKEN // experts
    return {"model": f"Qwen3-MoE, {total / 1e9:.2f} billion parameters, {active / 1e9:.2f} billion of them for a token"}


async def measure(urls: Mapping[str, str], setup: LoadSetup) -> list[ExpertsRow]:
    """Measures all servers in turns."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(connect_server(name, url, RequestStyle())) for name, url in urls.items()
        ]
        fresh = FreshPrompts(await servers[0].load(setup.max_tokens).tokens_of(TEXT), seed=new_seed())
        for server in servers:
            await server.timed([fresh.next(setup.prompt_tokens)], max(setup.ns), max_tokens=setup.max_tokens, seed=0)
        rows = []
        for n in setup.ns:
            samples = []
            for repeat in range(setup.repeats):
                prompts = [fresh.next(setup.prompt_tokens)]
                samples.append(
                    [await one.timed(prompts, n, max_tokens=setup.max_tokens, seed=repeat) for one in servers]
                )
            medians = [median_sample(own).timing for own in zip(*samples, strict=True)]
            rows.append(ExpertsRow(n, setup.prompt_tokens, dict(zip(urls, medians, strict=True))))
            progress(f"n = {n}: {', '.join(f'{timing.total_s:.2f} s' for timing in medians)}")
    return rows


def main(argv: Sequence[str]) -> int:
    parser = load_parser("bench.compare.experts", __doc__, ns=(1, 8, 32), prompt_tokens=512, max_tokens=32, repeats=2)
    parser.add_argument("--layers", type=int, default=16, help="number of layers of the model")
    parser.add_argument("--experts", type=int, default=32, help="number of experts of a layer")
    parser.add_argument("--vllm", type=Path, help="a virtual environment with vLLM, to measure it too")
    arguments = parser.parse_args(argv)
    conditions = machine()
    tokenizer = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        sizes = save_model(folder, layers=arguments.layers, experts=arguments.experts, tokenizer=tokenizer)
        urls = {
            kernels: stack.enter_context(motet_server(name, "--kernels", kernels)).url for kernels in (COMPILED, TORCH)
        }
        if arguments.vllm is not None:
            server = stack.enter_context(peer_server(VLLMSetup(arguments.vllm, folder, all_cores())))
            server.wait_until_ready()
            urls[server.name] = server.url
        rows = asyncio.run(measure(urls, LoadSetup.of(arguments)))
    line = f"prompt of {arguments.prompt_tokens} tokens, {arguments.max_tokens} tokens per choice"
    record = {**sizes, "rows": [row.record() for row in rows]}
    shown = (line, table(row.cells() for row in rows))
    return print_report(record, *shown, conditions={**conditions, **sizes}, targets=(), check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
