"""Measures what post-training needs of a server: rollouts, new weights, and log-probabilities that the trainer shares.

In one run, with the same prompts, which no cache has: Motet, vLLM's CPU build if one is given, and `model.generate`. In
bf16 and in float32:

- tokens/s of a batch, 64 prompts with 16 answers each, all sent at once and answered whole, as trainers ask;
- |log p(rollout) - log p(trainer)| of the drawn tokens. The trainer is `transformers` in float32. Where the server has
  bf16 weights, so has the trainer ("rounded"), and beside it stands the distance to the weights before rounding;
- the same after an update by each way, and without one ("stale");
- the seconds of an update by each way, and for how long a stream with n = 16 stands still.

The share of generation is that of a GRPO step: generation, one forward and backward pass over all answers (measured
over four answers, and multiplied), and an update.

Prints tables, and JSON on the last line.

Floors (--check fails when one is missed): in bf16 1.3 times vLLM's tokens/s; in float32 a mean distance of at most
0.0001 nats at the start and after every update, and in bf16 at most 1.1 times vLLM's; no stream stands still for more
than a second.

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

from bench.client.load import load_parser
from bench.client.prompts import TEXT, FreshPrompts, new_seed
from bench.program.command_line import progress
from bench.program.report import machine, tell
from bench.rollout.results import Results, Served, floors, tables
from bench.rollout.trainer import Drawn, Policy
from bench.rollout.weight_updates import Send, update_while_streaming, ways
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server
from bench.servers.peer import all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from motet.deploy.child import ChildServer
from motet.models.model_source import resolve
from motet.settings.server_config import cache_folder, environment

DTYPES = ("bfloat16", "float32")
OURS = ("--rl", "--queue-timeout", "900")
WARM_UP_TOKENS = 8
COMPARED_PROMPTS, COMPARED_N = 4, 4
"""Prompts, and answers to each, whose log-probabilities the trainer computes too. It needs a second for each answer."""


@dataclass(frozen=True)
class Shape:
    """A batch of rollouts."""

    prompts: int
    n: int
    prompt_tokens: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.n * self.max_tokens


QUICK = Shape(8, 16, 200, 32)
WHOLE = Shape(64, 16, 200, 128)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[_Choice]


async def draw(server: ComparedServer, prompt: Sequence[int], n: int, max_tokens: int) -> list[Drawn]:
    """Returns the n answers to a prompt, from one request."""
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
    choices = msgspec.json.decode(response.content, type=_Answer).choices
    return [Drawn(prompt, choice.token_ids, choice.logprobs.token_logprobs) for choice in choices]


async def draw_batch(
    server: ComparedServer, prompts: Sequence[Sequence[int]], shape: Shape
) -> tuple[list[Drawn], float]:
    """Returns all answers, those of a prompt together, and the seconds that they took."""
    await asyncio.sleep(server.style.settle_s)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(draw(server, prompt, shape.n, shape.max_tokens)) for prompt in prompts]
    return [answer for task in asked for answer in task.result()], time.perf_counter() - begin


@dataclass
class RolloutBench:
    """Measures one server after the other with the same policy."""

    shape: Shape
    policy: Policy
    fresh: FreshPrompts
    ways: Mapping[str, Send]
    results: Results = field(default_factory=Results)

    async def serve(self, server: ComparedServer, dtype: str) -> None:
        """Measures a batch, and how far its log-probabilities are from the trainer's."""
        await draw(server, self.fresh.next(self.shape.prompt_tokens), self.shape.n, WARM_UP_TOKENS)
        prompts = [self.fresh.next(self.shape.prompt_tokens) for _ in range(self.shape.prompts)]
        answers, taken_s = await draw_batch(server, prompts, self.shape)
        progress(f"{server.name}, {dtype}: {self.shape.tokens / taken_s:.0f} tokens/s")
        self.results.served.append(Served(server.name, dtype, taken_s, self.shape.tokens / taken_s))
        self._compare(server.name, dtype, "start", answers)
        if not self.results.train_s:
            some = answers[:COMPARED_N]
            self.results.train_s = self.policy.step_s(some) * len(answers) / len(some)

    async def update(self, server: ComparedServer, dtype: str) -> None:
        """Measures an update by each way, after a batch under the weights that are then too old."""
        for name, send in self.ways.items():
            self.policy.nudge()
            if not self.results.mean(server.name, dtype, "stale"):
                self._compare(server.name, dtype, "stale", await self._draw_some(server))
            url, tensors = str(server.client.base_url), self.policy.named_tensors()
            sent = partial(send, url.rstrip("/"), tensors, f"by {name}")
            prompt = self.fresh.next(self.shape.prompt_tokens)
            updated = await update_while_streaming(server.client, server.model, prompt, sent)
            self.results.updates[f"{name}, {dtype}"] = updated
            self._compare(server.name, dtype, name, await self._draw_some(server))

    async def _draw_some(self, server: ComparedServer) -> list[Drawn]:
        prompts = [self.fresh.next(self.shape.prompt_tokens) for _ in range(COMPARED_PROMPTS)]
        return (await draw_batch(server, prompts, replace(self.shape, n=COMPARED_N)))[0]

    def _compare(self, server: str, dtype: str, after: str, answers: Sequence[Drawn]) -> None:
        number = min(len(answers), COMPARED_PROMPTS * COMPARED_N)
        some = answers[:: len(answers) // number][:number]
        for rounded in (True, False) if dtype == "bfloat16" else (False,):
            self.results.compared(server, dtype, after, rounded, self.policy.mismatch(some, rounded=rounded))

    def generate(self, prompts: int) -> None:
        """Measures `model.generate` with so many prompts in its batch."""
        batch = [self.fresh.next(self.shape.prompt_tokens) for _ in range(prompts)]
        taken_s = self.policy.generate_s(batch, self.shape.n, self.shape.max_tokens)
        speed = prompts * self.shape.n * self.shape.max_tokens / taken_s
        progress(f"model.generate: {speed:.0f} tokens/s")
        self.results.served.append(Served("generate", "float32", self.shape.tokens / speed, speed))


def measure(arguments: argparse.Namespace, folder: Path) -> Results:
    """Measures each server with the machine to itself."""
    model = resolve(arguments.model, cache=cache_folder(environment()), say=progress)
    shape = shape_of(arguments)
    tokens = AutoTokenizer.from_pretrained(model)(TEXT, add_special_tokens=False)["input_ids"]
    fresh = FreshPrompts(tokens, seed=new_seed())
    results = Results()
    for dtype in arguments.dtypes:
        (folder / dtype).mkdir()
        bench = RolloutBench(shape, Policy(model), fresh, ways(folder / dtype), results)
        with ChildServer([arguments.model, "--dtype", dtype, *OURS]) as server:
            asyncio.run(ours(bench, server.url, dtype))
        if arguments.vllm:
            setup = VLLMSetup(arguments.vllm, model, all_cores(), ("--dtype", dtype))
            bench = RolloutBench(shape, Policy(model), fresh, {}, results)
            with peer_server(setup) as peer:
                peer.wait_until_ready()
                asyncio.run(theirs(bench, peer.url, dtype))
    RolloutBench(shape, Policy(model), fresh, {}, results).generate(arguments.generate_prompts)
    return results


async def ours(bench: RolloutBench, url: str, dtype: str) -> None:
    async with connect_server("Motet", url, RequestStyle()) as server:
        await bench.serve(server, dtype)
        await bench.update(server, dtype)


async def theirs(bench: RolloutBench, url: str, dtype: str) -> None:
    async with connect_server("vLLM", url, RequestStyle()) as server:
        await bench.serve(server, dtype)


def shape_of(arguments: argparse.Namespace) -> Shape:
    base = QUICK if arguments.quick else WHOLE
    return Shape(
        arguments.prompts or base.prompts,
        arguments.n or base.n,
        arguments.prompt_tokens or base.prompt_tokens,
        arguments.max_tokens or base.max_tokens,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.rollout", __doc__)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure it too")
    parser.add_argument("--quick", action="store_true", help="8 prompts and 32 tokens, unless flags say more")
    parser.add_argument("--prompts", type=int, help="prompts of a batch")
    parser.add_argument("--n", type=int, help="answers to a prompt")
    parser.add_argument("--generate-prompts", type=int, default=4, help="prompts in the batch of model.generate")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=DTYPES, help="bfloat16,float32")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about = machine() | {"batch": str(shape_of(arguments))}
    with ExitStack() as stack:
        results = measure(arguments, Path(stack.enter_context(tempfile.TemporaryDirectory())))
    return tell(asdict(results), *tables(results), about=about, floors=floors(results), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
