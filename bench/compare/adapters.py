"""Measures LoRA adapters: tokens per second of an adapter against its base model, of several adapters in one batch, and
what is left after many loads and unloads. With `--vllm`, the same requests are sent to vLLM with `--enable-lora`.

The adapters are random, of one rank, on all linear layers, in a temporary folder. The servers get the same
completions requests, which ignore the end of an answer: one request with n choices, and one request of a few choices
for each of several adapters at the same time. Requests for the base model and for adapters alternate. Tokens per second
are all tokens divided by the time of the requests, the best of the runs.

Targets (`--check` fails if one is missed, for Motet only): an adapter has 0.85 of its base model's tokens per second
for each n, several adapters in one batch have 0.7 of the base model's at the same number of choices, and loads and
unloads add no descriptor and at most `MAX_LEAKED_MB` to the memory of the server's processes.

Run: python -m bench.compare.adapters [MODEL] [--ns 1,8,32] [--adapters 8] [--batch 32] [--rank 16] [--tokens 128]
    [--loads 100] [--runs 3] [--vllm VENV] [--check]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.program.command_line import progress
from bench.program.report import Bound, Target, machine, print_report, table
from bench.servers.motet_server import motet_server
from bench.servers.peer_server import all_cores, peer_server
from bench.servers.vllm import MODEL_NAME, VLLMSetup
from motet.errors import StartupError
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIN_SPEED, MIN_MIXED_SPEED = 0.85, 0.7
MAX_LEAKED_MB = 16.0
PROMPT = list(range(100, 164))
TIMEOUT_S = 600.0
MB = 2**20


@dataclass(frozen=True)
class AdapterRow:
    """One case of one server."""

    server: str
    case: str
    choices: int
    base_tokens_per_s: float
    tokens_per_s: float

    @property
    def speed(self) -> float:
        return self.tokens_per_s / self.base_tokens_per_s


@dataclass(frozen=True)
class Leaks:
    """What loads and unloads have left in the processes of a server."""

    loads: int
    descriptors: int
    memory_mb: float
    load_s: float
    """Mean time of a load."""


def save_random(model: Path, folder: Path, *, rank: int, seed: int) -> Path:
    """Writes a random adapter of all linear layers of a model folder."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": [*LINEAR]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(model)}))
    tensors = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is not a mapping
                layer = name.removesuffix(".weight")
                if layer.rpartition(".")[2] not in LINEAR:
                    continue
                outputs, inputs = opened.get_slice(name).get_shape()
                for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    values = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"base_model.model.{layer}.lora_{part}.weight"] = values.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@dataclass(frozen=True)
class AdapterServer:
    """A running server, and the name of its base model."""

    name: str
    base: str
    http: httpx.AsyncClient

    async def tokens_per_s(self, models: Sequence[str], *, n: int, tokens: int) -> float:
        """Sends a request with n choices for each model at the same time."""
        started_s = time.perf_counter()
        await asyncio.gather(*(self._complete(model, n=n, tokens=tokens) for model in models))
        return len(models) * n * tokens / (time.perf_counter() - started_s)

    async def load(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        (await self.http.post("/v1/load_lora_adapter", json=body)).raise_for_status()

    async def unload(self, name: str) -> None:
        (await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()

    async def _complete(self, model: str, *, n: int, tokens: int) -> None:
        # No seed: vLLM 0.32's CPU build ends when it computes the prompt of a seeded request in chunks.
        body = {"model": model, "prompt": PROMPT, "n": n, "max_tokens": tokens, "ignore_eos": True}
        answer = await self.http.post("/v1/completions", json=body)
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == n * tokens


async def measure(server: AdapterServer, folders: Sequence[Path], args: argparse.Namespace) -> list[AdapterRow]:
    """Loads the adapters, and measures all cases."""
    names = [folder.name for folder in folders]
    for folder in folders:
        await server.load(folder.name, folder)
    rows = []
    each = args.batch // len(names)
    cases = [*((f"n = {n}", n, names[:1]) for n in args.ns), (f"{len(names)} adapters", each, names)]
    for case, n, models in cases:
        base = [server.base] * len(models)
        await server.tokens_per_s(models, n=n, tokens=8)
        for_base, for_adapters = 0.0, 0.0
        for _ in range(args.runs):
            for_base = max(for_base, await server.tokens_per_s(base, n=n, tokens=args.tokens))
            for_adapters = max(for_adapters, await server.tokens_per_s(models, n=n, tokens=args.tokens))
        rows.append(AdapterRow(server.name, case, n * len(models), for_base, for_adapters))
        progress(f"{server.name}, {case}: {rows[-1].speed:.2f} of the base model")
    return rows


async def leaks(server: AdapterServer, pid: int, folder: Path, *, loads: int) -> Leaks:
    """Loads and unloads an adapter under other names, and compares the processes of the server before and after."""

    async def cycle(number: int) -> None:
        await server.load(f"cycle-{number}", folder)
        await server.tokens_per_s([f"cycle-{number}"], n=1, tokens=2)
        await server.unload(f"cycle-{number}")

    for number in range(min(loads, 10)):  # until pools have their size
        await cycle(number)
    before, started_s = footprint(pid), time.perf_counter()
    for number in range(loads):
        await cycle(number)
    after = footprint(pid)
    load_s = (time.perf_counter() - started_s) / max(1, loads)
    return Leaks(loads, after[0] - before[0], (after[1] - before[1]) / MB, load_s)


async def measure_vllm(model: Path, folders: Sequence[Path], args: argparse.Namespace) -> list[AdapterRow]:
    flags = ["--enable-lora", "--max-loras", str(len(folders) + 1), "--max-lora-rank", str(args.rank)]
    environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with peer_server(VLLMSetup(args.vllm, model, all_cores(), flags, environ)) as peer:
        await asyncio.to_thread(peer.wait_until_ready)
        async with httpx.AsyncClient(base_url=peer.url, timeout=TIMEOUT_S) as http:
            return await measure(AdapterServer("vLLM", MODEL_NAME, http), folders, args)


def footprint(pid: int) -> tuple[int, int]:
    """Returns the number of open descriptors, and the private memory in bytes, of a process and its children."""
    main = psutil.Process(pid)
    processes = [main, *main.children(recursive=True)]
    return sum(one.num_fds() for one in processes), sum(one.memory_full_info().uss for one in processes)


def targets(rows: Sequence[AdapterRow], left: Leaks) -> list[Target]:
    own = [row for row in rows if row.server == "motet"]
    return [
        *(
            Target(f"{row.case}: of the base model's tokens/s", row.speed, limit, Bound.AT_LEAST)
            for row in own
            for limit in [MIN_SPEED if row.case.startswith("n =") else MIN_MIXED_SPEED]
        ),
        Target(f"descriptors after {left.loads} loads and unloads", float(left.descriptors), 0.0),
        Target("MB of memory after them", left.memory_mb, MAX_LEAKED_MB),
    ]


async def run(args: argparse.Namespace) -> int:
    model = resolve(args.model, cache=cache_folder(environment()), revision=None, progress=Lines(progress))
    rows: list[AdapterRow] = []
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-adapters-")))
        folders = [
            save_random(model, place / f"adapter-{number}", rank=args.rank, seed=number)
            for number in range(args.adapters)
        ]
        count = str(args.adapters + 1)
        with motet_server(str(model), "--served-model-name", "base", "--max-adapters", count) as child:
            async with httpx.AsyncClient(base_url=child.url, timeout=TIMEOUT_S) as http:
                server = AdapterServer("motet", "base", http)
                rows += await measure(server, folders, args)
                left = await leaks(server, child.pid, folders[0], loads=args.loads)
        if args.vllm is not None:
            try:
                rows += await measure_vllm(model, folders, args)
            except (StartupError, httpx.HTTPError) as error:  # Motet's figures are still worth a report
                progress(f"vLLM: {error!r}")
    shown = table(
        [
            ("server", row.server, "<"),
            ("case", row.case, "<"),
            ("choices", row.choices, ""),
            ("base tokens/s", row.base_tokens_per_s, ".0f"),
            ("adapters tokens/s", row.tokens_per_s, ".0f"),
            ("/ base", row.speed, ".2f"),
        ]
        for row in rows
    )
    cycles = f"{left.loads} loads and unloads, {left.load_s:.3f} s each with a request: "
    cycles += f"{left.descriptors:+d} descriptors, {left.memory_mb:+.1f} MB"
    record = {"rows": [asdict(row) | {"speed": row.speed} for row in rows], "leaks": asdict(left)}
    limits = targets(rows, left)
    print_report(record, shown, cycles, conditions=machine(), targets=limits)
    return int(args.check and not all(target.met for target in limits))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--ns", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 32])
    for name, default in (("adapters", 8), ("batch", 32), ("rank", 16), ("tokens", 128), ("loads", 100), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(parse(sys.argv[1:]))))
