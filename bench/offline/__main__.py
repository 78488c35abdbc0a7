"""Measures offline generation of many prompts: `LLM`, HTTP with 64 clients, `motet batch`, and vLLM's `LLM` class.

All modes generate the same prompts (token ids of mixed lengths, each with n choices of a fixed length) with the same
settings. "engine" is one engine process without router, HTTP and texts: the lower bound of all other times. Each mode
loads the model again, and the time starts when the model is loaded. `motet batch` does not report this moment: its time
includes the start, which is measured with a file of one line and subtracted.

With `--kill-every`, `motet batch` is also run with SIGKILL after each period of this length, and started again until it
ends by itself; each line must then be in the output exactly once. This time contains the starts.

Target (`--check` fails if it is missed): `LLM` takes at most 1.03 times as long as the engine.

Run: python -m bench.offline [--model FOLDER] [--prompts 200] [--n 8] [--modes engine,llm,http,batch]
    [--vllm VENV] [--kill-every 30] [--repeats 1] [--check]
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bench.offline.modes import MODES, Measured, OfflineSetup, run_killed_batch, run_vllm
from bench.offline.work import OfflineWork
from bench.program.command_line import add_check, benchmark_parser, progress
from bench.program.report import Cells, Target, machine, print_report, table
from motet.models.model_source import resolve
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

MAX_RATIO = 1.03


def cells(mode: str, times: Sequence[Measured], engine_s: float | None) -> Cells:
    total_s = median(time.total_s for time in times)
    return [
        ("mode", mode, "<"),
        ("total s", total_s, ".2f"),
        ("output tokens/s", times[0].num_tokens / total_s, ".0f"),
        ("prompts/s", times[0].num_prompts / total_s, ".1f"),
        ("total / engine", engine_s and total_s / engine_s, ".3f"),
    ]


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser("bench.offline", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder or name of the model")
    parser.add_argument("--prompts", type=int, default=200, help="number of prompts")
    parser.add_argument("--n", type=int, default=8, help="number of choices of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="maximum number of tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum number of tokens of a choice")
    parser.add_argument("--modes", default=",".join(MODES), help="modes, separated by commas")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM, for the mode vllm")
    parser.add_argument("--kill-every", type=float, metavar="S", help="period of kills in seconds, for the mode killed")
    parser.add_argument("--clients", type=int, default=64, help="number of HTTP clients")
    parser.add_argument("--kv-cache-gb", type=float, default=2.0, help="size of the KV cache in GiB")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--repeats", type=int, default=1, help="number of measurements of each mode")
    add_check(parser)
    arguments = parser.parse_args(argv)
    folder = resolve(arguments.model, cache=cache_folder(environment()))
    setup = OfflineSetup(folder, arguments.kv_cache_gb, threads=arguments.threads, clients=arguments.clients)
    work = OfflineWork.of_mixed_lengths(
        arguments.prompts,
        n=arguments.n,
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
    )
    modes = {name: MODES[name] for name in arguments.modes.split(",") if name}
    if arguments.vllm is not None:
        modes["vllm"] = run_vllm(arguments.vllm)
    if arguments.kill_every is not None:
        modes["killed"] = run_killed_batch(arguments.kill_every)
    found: dict[str, list[Measured]] = {name: [] for name in modes}
    for _ in range(arguments.repeats):
        for name, run in modes.items():
            found[name].append(run(setup, work))
            progress(f"{name}: {found[name][-1].total_s:.2f} s")
    engine_s = median(time.total_s for time in found["engine"]) if "engine" in found else None
    ratio = None
    if engine_s is not None and "llm" in found:
        ratio = median(time.total_s for time in found["llm"]) / engine_s
    target = Target("time of LLM / time of the engine", ratio, MAX_RATIO)
    shown = table(cells(name, times, engine_s) for name, times in found.items())
    record = {name: [asdict(time) for time in times] for name, times in found.items()}
    return print_report(record, shown, conditions=machine(), targets=[target], check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
