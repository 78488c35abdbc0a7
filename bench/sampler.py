"""Measures the sampling of a step: milliseconds for 32 and 128 choices, vocabulary 49,152, for each way of sampling.

The logits are synthetic, in bf16. Probabilities fall with a power of their rank, whose exponent differs from row to
row, with an exponential cut-off. So top-p keeps about as many tokens as for SmolLM2 when it generates a story (top-p
0.9: median 14, one row in ten above 100; 0.99: median 290, one in ten above 1,400; printed first). "fork" samples all
choices from one row, like the first tokens of a group. The logits of "flat" are normally distributed: top-p keeps about
20,000 tokens, more than for nine rows in ten of SmolLM2 at temperature 1.3 (median 1,800, one in ten above 6,600).
Prints a table, and JSON on the last line.

Run: python -m bench.sampler [--rows 32,128] [--repeats 30] [--device cpu] [--threads 2] [--cpu-time]
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from bench.program.command_line import benchmark_parser, numbers
from bench.program.report import machine, print_report, table
from motet.engines.native.sample.lanes import SampleRow
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens
from motet.types import SamplingParams

VOCAB = 49_152
PROMPT = [token_id % 500 for token_id in range(1340)]
PROMPT_TOKENS = PromptTokens(PROMPT)
GENERATED = list(range(400, 600))
WAYS = {
    "temperature 1": SamplingParams(max_tokens=999),
    "temperature 1, fork": SamplingParams(max_tokens=999),
    "greedy": SamplingParams(max_tokens=999, temperature=0.0),
    "temperature 0.7": SamplingParams(max_tokens=999, temperature=0.7),
    "min_p 0.05": SamplingParams(max_tokens=999, min_p=0.05),
    "top_k 50": SamplingParams(max_tokens=999, top_k=50),
    "top_p 0.9": SamplingParams(max_tokens=999, top_p=0.9),
    "top_p 0.99": SamplingParams(max_tokens=999, top_p=0.99),
    "temperature 0.7, top_p 0.95": SamplingParams(max_tokens=999, temperature=0.7, top_p=0.95),
    "temperature 1.3, top_p 0.95, flat": SamplingParams(max_tokens=999, temperature=1.3, top_p=0.95),
    "top_k 50, top_p 0.9": SamplingParams(max_tokens=999, top_k=50, top_p=0.9),
    "few allowed tokens, top_k 100": SamplingParams(max_tokens=999, top_k=100, allowed_token_ids=tuple(range(5))),
    "presence and frequency": SamplingParams(max_tokens=999, presence_penalty=0.2, frequency_penalty=0.5),
    "repetition": SamplingParams(max_tokens=999, repetition_penalty=1.1),
    "logprobs 5": SamplingParams(max_tokens=999, logprobs=5),
}


def synthetic_logits(rows: int, device: torch.device) -> torch.Tensor:
    """Returns synthetic logits [rows, VOCAB] bf16."""
    generator = torch.Generator().manual_seed(0)
    exponents = 1.0 + 1.3 * torch.rand(rows, 1, generator=generator)
    ranks = torch.arange(1, VOCAB + 1)
    by_rank = -exponents * ranks.log() - ranks / 1500
    places = torch.rand(rows, VOCAB, generator=generator).argsort(-1)
    return (20 + by_rank.gather(1, places)).bfloat16().to(device)


def flat_logits(rows: int, device: torch.device) -> torch.Tensor:
    """Returns logits [rows, VOCAB] bf16 of an undecided model."""
    return (2.4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))).bfloat16().to(device)


def kept_by_top_p(logits: torch.Tensor, top_p: float) -> str:
    mass = logits.float().softmax(-1).sort(descending=True).values.cumsum(-1)
    quantiles = (1 + (mass < top_p).sum(-1)).float().quantile(torch.tensor([0.5, 0.9], device=logits.device))
    return f"top_p {top_p} keeps {quantiles[0]:.0f} tokens (median), {quantiles[1]:.0f} (90th percentile)"


def sample_rows(params: SamplingParams, rows: int, *, fork: bool) -> list[SampleRow]:
    return [
        SampleRow(
            logits_row=0 if fork else row,
            state=ChoiceSampling(params, seed=row, prompt=PROMPT_TOKENS, eos_token_ids=(0,), output_tokens=GENERATED),
            position=len(PROMPT) + len(GENERATED),
        )
        for row in range(rows)
    ]


def milliseconds(work: Callable[[], object], repeats: int, *, cpu_time: bool) -> float:
    """Returns the median wall time, or the minimum CPU time of this thread, after one run to warm up. The work ends
    with a copy to the host, so no device work is left."""
    clock, figure = (time.thread_time, min) if cpu_time else (time.perf_counter, median)
    work()
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append((clock() - start) * 1e3)
    return round(figure(times), 3)


def measure(rows: int, repeats: int, device: torch.device, *, cpu_time: bool) -> dict[str, float]:
    sampler, usual, flat = Sampler(VOCAB, device), synthetic_logits(rows, device), flat_logits(rows, device)
    figures = {}
    for name, params in WAYS.items():
        logits, sampled = flat if "flat" in name else usual, sample_rows(params, rows, fork="fork" in name)
        figures[name] = milliseconds(partial(sampler.sample, logits, sampled), repeats, cpu_time=cpu_time)
    return figures


def main() -> None:
    parser = benchmark_parser("bench.sampler", __doc__)
    parser.add_argument("--rows", type=numbers, default=(32, 128), help="numbers of choices of a step, e.g. 32,128")
    parser.add_argument("--repeats", type=int, default=30, help="number of timed steps of each case")
    parser.add_argument("--device", default="cpu", help="device of the sampler")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of torch's threads")
    parser.add_argument("--cpu-time", action="store_true", help="minimum CPU time of one thread, for a busy machine")
    options = parser.parse_args()
    threads = 1 if options.cpu_time else options.threads
    torch.set_num_threads(threads)
    device = torch.device(options.device)
    results = {rows: measure(rows, options.repeats, device, cpu_time=options.cpu_time) for rows in options.rows}
    kept = [kept_by_top_p(synthetic_logits(128, device), top_p) for top_p in (0.9, 0.99)]
    shown = table(
        [("ms per step", name, "<"), *((f"{rows} choices", results[rows][name], ".2f") for rows in results)]
        for name in WAYS
    )
    print_report(
        {"threads": threads, "cpu_time": options.cpu_time, "vocab_size": VOCAB, "ms": results},
        *kept,
        shown,
        conditions=machine(),
    )


if __name__ == "__main__":
    main()
