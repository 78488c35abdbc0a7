"""Measures a server for post-training: rollouts, new weights, and log-probabilities compared with the trainer's.

In one run, with the same prompts, which are not cached: Motet, vLLM's CPU build on request, and `model.generate`. In
bf16 and in float32:

- tokens/s of a batch of 64 prompts with 16 answers each, all sent at once and not streamed, as trainers do;
- |log p(rollout) - log p(trainer)| of the sampled tokens. The trainer is `transformers` in float32. If the server has
  bf16 weights, so has the trainer ("rounded"); the distance to the weights before rounding is printed too;
- the same after an update in each way, and without an update ("stale");
- the seconds of an update in each way, and the longest pause of a stream with n = 16.

The share of generation refers to a GRPO step: generation, one forward and backward pass over all answers (measured over
four answers, and multiplied), and an update.

Prints tables, and JSON on the last line.

Targets (--check fails if one is missed): in bf16 1.3 times vLLM's tokens/s; in float32 a mean distance of at most
0.0001 nats at the start and after every update, and in bf16 at most 1.1 times vLLM's; no stream pauses for more than a
second.

Run: python -m bench.rollout [--vllm VENV] [--quick] [--prompts 64] [--n 16] [--check]
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
from transformers import AutoTokenizer

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import load_parser
from bench.program.command_line import progress
from bench.program.report import machine, print_report
from bench.rollout.results import RolloutResults, ServedBatch, tables, targets
from bench.rollout.timed_updates import SendWeights, update_ways, update_while_streaming
from bench.rollout.trainer import Rollout, TrainedPolicy
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server
from bench.servers.peer_server import all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from motet.deploy.child import ChildServer
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment

DTYPES = ("bfloat16", "float32")
MOTET_FLAGS = ("--rl", "--queue-timeout", "900")
WARM_UP_TOKENS = 8
COMPARED_PROMPTS, COMPARED_N = 4, 4
"""Numbers of prompts, and of answers to each, for which the trainer also computes log-probabilities. It needs a second
per answer."""


@dataclass(frozen=True)
class BatchShape:
    """A batch of rollouts."""

    prompts: int
    n: int
    prompt_tokens: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.n * self.max_tokens


QUICK = BatchShape(8, 16, 200, 32)
FULL = BatchShape(64, 16, 200, 128)


class _TokenLogprobs(msgspec.Struct):
    token_logprobs: list[float]


class _RolloutChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    logprobs: _TokenLogprobs


class _RolloutAnswer(msgspec.Struct):
    choices: list[_RolloutChoice]


async def sample(server: ComparedServer, prompt: Sequence[int], n: int, max_tokens: int) -> list[Rollout]:
    """Returns n answers to a prompt, from one request."""
    body = {
        "model": server.model,
        "prompt": list(prompt),
        "n": n,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    response = await server.client.post("/v1/completions", json=body)
    response.raise_for_status()
    choices = msgspec.json.decode(response.content, type=_RolloutAnswer).choices
    return [Rollout(prompt, choice.token_ids, choice.logprobs.token_logprobs) for choice in choices]


async def sample_batch(
    server: ComparedServer, prompts: Sequence[Sequence[int]], shape: BatchShape
) -> tuple[list[Rollout], float]:
    """Returns all answers, ordered by prompt, and the seconds for the batch."""
    await asyncio.sleep(server.style.settle_s)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(sample(server, prompt, shape.n, shape.max_tokens)) for prompt in prompts]
    return [answer for request in requests for answer in request.result()], time.perf_counter() - begin


@dataclass
class RolloutBench:
    """Measures one server after the other with the same policy."""

    shape: BatchShape
    policy: TrainedPolicy
    fresh: FreshPrompts
    ways: Mapping[str, SendWeights]
    results: RolloutResults = field(default_factory=RolloutResults)

    async def serve(self, server: ComparedServer, dtype: str) -> None:
        """Measures a batch, and the distance of its log-probabilities from the trainer's."""
        await sample(server, self.fresh.next(self.shape.prompt_tokens), self.shape.n, WARM_UP_TOKENS)
        prompts = [self.fresh.next(self.shape.prompt_tokens) for _ in range(self.shape.prompts)]
        answers, taken_s = await sample_batch(server, prompts, self.shape)
        progress(f"{server.name}, {dtype}: {self.shape.tokens / taken_s:.0f} tokens/s")
        self.results.served.append(ServedBatch(server.name, dtype, taken_s, self.shape.tokens / taken_s))
        self._compare(server.name, dtype, "start", answers)
        if not self.results.train_s:
            some = answers[:COMPARED_N]
            self.results.train_s = self.policy.step_s(some) * len(answers) / len(some)

    async def update(self, server: ComparedServer, dtype: str) -> None:
        """Measures an update in each way. The first one follows a batch under weights that are then stale."""
        for name, send in self.ways.items():
            self.policy.nudge()
            if not self.results.mean(server.name, dtype, "stale"):
                self._compare(server.name, dtype, "stale", await self._sample_some(server))
            url, tensors = str(server.client.base_url), self.policy.named_tensors()
            send_tensors = partial(send, url.rstrip("/"), tensors, f"by {name}")
            prompt = self.fresh.next(self.shape.prompt_tokens)
            updated = await update_while_streaming(server.client, server.model, prompt, send_tensors)
            self.results.updates[f"{name}, {dtype}"] = updated
            self._compare(server.name, dtype, name, await self._sample_some(server))

    async def _sample_some(self, server: ComparedServer) -> list[Rollout]:
        prompts = [self.fresh.next(self.shape.prompt_tokens) for _ in range(COMPARED_PROMPTS)]
        return (await sample_batch(server, prompts, replace(self.shape, n=COMPARED_N)))[0]

    def _compare(self, server: str, dtype: str, after: str, answers: Sequence[Rollout]) -> None:
        number = min(len(answers), COMPARED_PROMPTS * COMPARED_N)
        some = answers[:: len(answers) // number][:number]
        for rounded in (True, False) if dtype == "bfloat16" else (False,):
            self.results.compared(server, dtype, after, rounded, self.policy.mismatch(some, rounded=rounded))

    def generate(self, prompts: int) -> None:
        """Measures `model.generate` with this number of prompts in its batch."""
        batch = [self.fresh.next(self.shape.prompt_tokens) for _ in range(prompts)]
        taken_s = self.policy.generate_s(batch, self.shape.n, self.shape.max_tokens)
        speed = prompts * self.shape.n * self.shape.max_tokens / taken_s
        progress(f"model.generate: {speed:.0f} tokens/s")
        self.results.served.append(ServedBatch("generate", "float32", self.shape.tokens / speed, speed))


def measure(arguments: argparse.Namespace, folder: Path) -> RolloutResults:
    """Measures one server after the other. Only one runs at a time."""
    model = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
    shape = shape_of(arguments)
    tokens = AutoTokenizer.from_pretrained(model)(TEXT, add_special_tokens=False)["input_ids"]
    fresh = FreshPrompts(tokens, seed=new_seed())
    results = RolloutResults()
    for dtype in arguments.dtypes:
        (folder / dtype).mkdir()
        bench = RolloutBench(shape, TrainedPolicy(model), fresh, update_ways(folder / dtype), results)
        with ChildServer([arguments.model, "--dtype", dtype, *MOTET_FLAGS]) as server:
            asyncio.run(measure_motet(bench, server.url, dtype))
        if arguments.vllm:
            setup = VLLMSetup(arguments.vllm, model, all_cores(), ("--dtype", dtype))
            bench = RolloutBench(shape, TrainedPolicy(model), fresh, {}, results)
            with peer_server(setup) as peer:
                peer.wait_until_ready()
                asyncio.run(measure_vllm(bench, peer.url, dtype))
    RolloutBench(shape, TrainedPolicy(model), fresh, {}, results).generate(arguments.generate_prompts)
    return results


async def measure_motet(bench: RolloutBench, url: str, dtype: str) -> None:
    async with connect_server("Motet", url, RequestStyle()) as server:
        await bench.serve(server, dtype)
        await bench.update(server, dtype)


async def measure_vllm(bench: RolloutBench, url: str, dtype: str) -> None:
    async with connect_server("vLLM", url, RequestStyle()) as server:
        await bench.serve(server, dtype)


def shape_of(arguments: argparse.Namespace) -> BatchShape:
    base = QUICK if arguments.quick else FULL
    return BatchShape(
        arguments.prompts or base.prompts,
        arguments.n or base.n,
        arguments.prompt_tokens or base.prompt_tokens,
        arguments.max_tokens or base.max_tokens,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.rollout", __doc__)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure vLLM too")
    parser.add_argument("--quick", action="store_true", help="8 prompts and 32 tokens, unless other flags are set")
    parser.add_argument("--prompts", type=int, help="number of prompts of a batch")
    parser.add_argument("--n", type=int, help="number of answers to a prompt")
    parser.add_argument("--generate-prompts", type=int, default=4, help="prompts in the batch of model.generate")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=DTYPES, help="bfloat16,float32")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions = machine() | {"batch": str(shape_of(arguments))}
    with ExitStack() as stack:
        results = measure(arguments, Path(stack.enter_context(tempfile.TemporaryDirectory())))
    shown = tables(results)
    return print_report(asdict(results), *shown, conditions=conditions, targets=targets(results), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
