"""The modes of the benchmark: each starts what it needs, generates all prompts, and returns the time."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.offline.work import OfflineWork
from bench.program.command_line import progress
from motet import LLM, RequestOutput, SamplingParams
from motet.deploy.child import ChildServer
from motet.engines.native.client import NativeEngine
from motet.ids import RequestId
from motet.settings.engine_config import EngineConfig
from motet.settings.server_config import environment
from motet.types import GenerateRequest, choice_starts
from motet.types import SamplingParams as EngineParams

SEED = 1
IN_PROGRESS = 512
"""Maximum number of concurrent choices in the mode `engine`."""
NAME = "bench"

# No seeds: vLLM 0.32's CPU build ends when it computes the prompt of a seeded request in chunks.
VLLM_PROGRAM = """
import json, sys, time
from vllm import LLM, SamplingParams, TokensPrompt
work = json.load(open(sys.argv[1]))
llm = LLM(model=work["model"], dtype="bfloat16", max_model_len=4096, enforce_eager=True)
params = [SamplingParams(n=work["n"], max_tokens=m, ignore_eos=True) for m in work["max_tokens"]]
prompts = [TokensPrompt(prompt_token_ids=ids) for ids in work["prompts"]]
llm.generate(prompts[:1], params[:1], use_tqdm=False)
start = time.monotonic()
outputs = llm.generate(prompts, params, use_tqdm=False)
total = time.monotonic() - start
tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
print("RESULT", json.dumps({"total_s": total, "num_tokens": tokens}))
"""


@dataclass(frozen=True)
class OfflineSetup:
    """The model and the settings of all modes."""

    folder: Path
    kv_cache_gb: float
    threads: int
    clients: int

    @property
    def arguments(self) -> list[str]:
        sizes = ["--kv-cache-gb", str(self.kv_cache_gb), "--threads", str(self.threads)]
        return [str(self.folder), "--served-model-name", NAME, *sizes, "--log-level", "warning"]


@dataclass(frozen=True)
class Measured:
    """The time of one mode for all prompts."""

    total_s: float
    num_tokens: int
    """Number of output tokens."""
    num_prompts: int


Run = Callable[[OfflineSetup, OfflineWork], Measured]


def checked(total_s: float, num_tokens: int, work: OfflineWork) -> Measured:
    """Returns the result. Raises AssertionError if tokens are missing."""
    if num_tokens != work.num_tokens:
        raise AssertionError(f"{num_tokens} output tokens instead of {work.num_tokens}")
    return Measured(total_s, num_tokens, len(work.prompts))


def run_engine(setup: OfflineSetup, work: OfflineWork) -> Measured:
    """Generates with an engine process alone."""
    return asyncio.run(_run_engine(setup, work))


async def _run_engine(setup: OfflineSetup, work: OfflineWork) -> Measured:
    config = EngineConfig(
        model_path=str(setup.folder), model_name=NAME, kv_cache_gb=setup.kv_cache_gb, num_threads=setup.threads
    )
    engine = await NativeEngine.start(config)
    limit = asyncio.Semaphore(max(1, IN_PROGRESS // work.n))

    async def group(number: int) -> int:
        request = GenerateRequest(
            request_id=RequestId(f"{number}"),
            prompt=tuple(work.prompts[number]),
            choices=choice_starts(work.n, SEED),
            sampling=EngineParams(max_tokens=work.max_tokens[number], ignore_eos=True),
        )
        async with limit:
            return sum([sum(len(one.token_ids) for one in delta.choices) async for delta in engine.generate(request)])

    try:
        start = time.monotonic()
        counts = await asyncio.gather(*map(group, range(len(work.prompts))))
        return checked(time.monotonic() - start, sum(counts), work)
    finally:
        await engine.close()


def run_llm(setup: OfflineSetup, work: OfflineWork) -> Measured:
    """Generates with `motet.LLM`."""
    with LLM(
        str(setup.folder), served_model_name=NAME, kv_cache_gb=setup.kv_cache_gb, num_threads=setup.threads
    ) as llm:
        params = [SamplingParams(n=work.n, max_tokens=m, ignore_eos=True, seed=SEED) for m in work.max_tokens]
        start = time.monotonic()
        outputs: list[RequestOutput] = llm.generate(work.prompts, params, use_tqdm=False)
        total_s = time.monotonic() - start
    return checked(total_s, sum(len(choice.token_ids) for output in outputs for choice in output.outputs), work)


def bodies(work: OfflineWork) -> list[dict[str, Any]]:
    """Returns the bodies of completions requests."""
    return [
        {"model": NAME, "prompt": ids, "n": work.n, "max_tokens": m, "ignore_eos": True, "seed": SEED}
        for ids, m in zip(work.prompts, work.max_tokens, strict=True)
    ]


def run_http(setup: OfflineSetup, work: OfflineWork) -> Measured:
    """Generates with concurrent clients, each of which sends one request at a time."""
    with ChildServer(setup.arguments) as server:
        return asyncio.run(_run_http(server.url, setup.clients, work=work))


async def _run_http(url: str, num_clients: int, *, work: OfflineWork) -> Measured:
    rest, tokens = iter(bodies(work)), 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal tokens
        for body in rest:
            response = await http.post("/v1/completions", json=body)
            tokens += response.raise_for_status().json()["usage"]["completion_tokens"]

    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        start = time.monotonic()
        await asyncio.gather(*(client(http) for _ in range(num_clients)))
        return checked(time.monotonic() - start, tokens, work)


def run_batch(setup: OfflineSetup, work: OfflineWork) -> Measured:
    """Completes a file of requests with `motet batch`. The time of a file with one line is subtracted."""
    start_s, _ = _timed_batch(setup, work.first(1))
    total_s, tokens = _timed_batch(setup, work)
    return checked(max(total_s - start_s, 0.0), tokens, work)


def run_killed_batch(kill_s: float) -> Run:
    """Returns the mode that kills `motet batch` every `kill_s` seconds and starts it again until it ends by itself."""

    def run(setup: OfflineSetup, work: OfflineWork) -> Measured:
        return checked(*_timed_batch(setup, work, kill_s=kill_s), work)

    return run


def _timed_batch(setup: OfflineSetup, work: OfflineWork, *, kill_s: float | None = None) -> tuple[float, int]:
    """Returns the time and the number of output tokens. Raises AssertionError if a line is missing or occurs twice."""
    with tempfile.TemporaryDirectory() as folder:
        input, output = Path(folder, "input.jsonl"), Path(folder, "output.jsonl")
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            for number, body in enumerate(bodies(work))
        ]
        input.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "motet", "batch", str(input), "-o", str(output), *setup.arguments]
        start = time.monotonic()
        while not _ended(command, kill_s):
            progress(f"batch: killed after {time.monotonic() - start:.0f} s")
        total_s = time.monotonic() - start
        answers = [json.loads(line) for line in output.read_text().splitlines()]
        if sorted(int(answer["custom_id"]) for answer in answers) != [*range(len(lines))]:
            raise AssertionError(f"{len(answers)} lines of output for {len(lines)} requests, or other ids")
        return total_s, sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)


def _ended(command: Sequence[str], kill_s: float | None) -> bool:
    """Runs a command, and kills it after `kill_s` seconds. Returns whether it ended by itself."""
    try:
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=kill_s)
    except subprocess.TimeoutExpired:  # `run` has sent SIGKILL
        return False
    return True


def run_vllm(venv: Path) -> Run:
    """Returns the mode that generates with vLLM's `LLM` class, in a process with this virtual environment."""

    def run(setup: OfflineSetup, work: OfflineWork) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "work.json")
            fields = {"model": str(setup.folder), "n": work.n, "prompts": work.prompts, "max_tokens": work.max_tokens}
            file.write_text(json.dumps(fields))
            environ = {
                **environment(),
                "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(setup.kv_cache_gb))),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
                "HF_HUB_OFFLINE": "1",
            }
            program = Path(folder, "program.py")
            program.write_text(f"if __name__ == '__main__':\n    exec({VLLM_PROGRAM!r})\n")
            command = [str(venv / "bin" / "python"), str(program), str(file)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ).stdout
        result = json.loads(printed.rpartition("RESULT ")[2].splitlines()[0])
        return checked(result["total_s"], result["num_tokens"], work)

    return run


MODES: Mapping[str, Run] = {"engine": run_engine, "llm": run_llm, "http": run_http, "batch": run_batch}
