"""Times the parts of a step of the default model, and counts the bytes and operations that each must cost.

Nothing is timed inside the kernels. What a part costs shows from outside: every product is called by itself, layer
after layer, so that its weights come from memory; and a step that the engine has run is run again without its trunk,
and without all but one key of a tail, which tells what attention costs.
"""

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from motet.engines.native import compiled_kernels as c
from motet.engines.native.attention.attention_plan import AttentionPlan, PromptRead
from motet.engines.native.build import build_parts
from motet.engines.native.core import EngineCore
from motet.engines.native.cpu.cpu_runner import CpuRunner
from motet.engines.native.step.inputs import StepInputs
from motet.errors import StartupError
from motet.ids import RequestId
from motet.settings.server_config import EngineConfig
from motet.types import GenerateRequest, SamplingParams, choice_starts

PRODUCTS = ("qkv", "out", "gate_up", "down")
PRODUCT, TRUNK, TAIL, PROMPT, REST, SAMPLER, PYTHON = (
    "product: {}",
    "attention: trunk",
    "attention: tails",
    "attention: prompt",
    "norms, positions, waits",
    "sampler",
    "Python around the step",
)
HEAD = PRODUCT.format("head")
WHOLE, FORWARD = "whole", "forward"
AGAIN, NO_TRUNKS, NO_KEYS = "again", "without trunks", "without keys"
"""What a step is run again with."""
FEW_ROWS = 32
"""Rows of a prompt that see nothing but each other, where its attention is left out: a few per cent of it are left."""
ID = RequestId("roofline")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """What a part must at least do."""

    bytes_read: float = 0.0
    """Weights, and keys and values, each once."""
    operations: float = 0.0
    """Multiplications and additions."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes_read + other.bytes_read, self.operations + other.operations)


Times = dict[str, float]
"""Seconds by part."""


class Watched:
    """A runner that keeps what it ran, and when it began, had logits, and was asked to verify the drawn tokens."""

    def __init__(self, runner: CpuRunner, clock: Clock) -> None:
        self.device, self.copy_slots, self.settle = runner.device, runner.copy_slots, runner.settle
        self._runner, self._clock = runner, clock
        self.ran: list[StepInputs] = []
        self.forward_s = self.sampler_s = self._left_s = 0.0

    @property
    def trunk_tokens_joined(self) -> int:
        return self._runner.trunk_tokens_joined

    def run(self, inputs: StepInputs) -> torch.Tensor:
        self.ran.append(inputs)
        begin = self._clock()
        logits = self._runner.run(inputs)
        self._left_s = self._clock()
        self.forward_s += self._left_s - begin
        return logits

    def verify(self) -> None:
        """The engine calls this after it has drawn the tokens."""
        self.sampler_s += self._clock() - self._left_s
        self._runner.verify()

    def take(self) -> tuple[float, float]:
        """Returns the seconds of the forward passes and of sampling since the last call."""
        taken = self.forward_s, self.sampler_s
        self.forward_s = self.sampler_s = 0.0
        return taken


class Stage:
    """An engine on this machine's CPU, and its kernels by themselves."""

    def __init__(
        self, folder: Path, *, threads: int, most: int, prompt_tokens: int, steps: int, kv_cache_gb: float = 2.0
    ) -> None:
        """`most`: the greatest number of choices; `steps`: the number of tokens that each may write."""
        if (kernels := c.library()) is None:
            raise StartupError("the compiled kernels were not built, or this processor has neither AVX-512 nor AVX2")
        self.clock: Clock = time.thread_time if threads == 1 else time.perf_counter
        config = EngineConfig(
            model_path=str(folder),
            model_name="roofline",
            device="cpu",
            dtype="bfloat16",
            kernels="compiled",
            max_model_len=prompt_tokens + steps,
            max_num_seqs=most,
            kv_cache_gb=kv_cache_gb,
            prefix_cache=False,
            num_threads=threads,
        )
        parts = build_parts(config)
        if not isinstance(parts.runner, CpuRunner):
            raise StartupError(f"the compiled kernels do not run {folder}")
        self.steps, self.prompt_tokens = steps, prompt_tokens
        self.runner = parts.runner
        self.model = parts.runner.model
        self.watched = Watched(parts.runner, self.clock)
        self.core = EngineCore(parts.info, self.watched, options=parts.options)
        self.kernels = kernels
        self.handle = kernels.motet_open(ctypes.byref(self.model.struct), threads)

    def close(self) -> None:
        self.kernels.motet_close(self.handle)

    def begin(self, n: int) -> Times:
        """Computes a new prompt for n choices; returns the times of that."""
        self.core.abort(ID)
        prompt = tuple(torch.randint(3, self.model.vocab_size, (self.prompt_tokens,)).tolist())
        sampling = SamplingParams(max_tokens=self.steps, ignore_eos=True)
        self.core.submit(GenerateRequest(request_id=ID, prompt=prompt, choices=choice_starts(n, 1), sampling=sampling))
        self.watched.take()
        self.watched.ran.clear()
        begin = self.clock()
        while not self.core.step().deltas:
            pass
        return self._split(self.clock() - begin)

    def step(self) -> Times:
        """Takes one step, and keeps only what that one ran."""
        self.watched.ran.clear()
        begin = self.clock()
        self.core.step()
        return self._split(self.clock() - begin)

    def _split(self, whole_s: float) -> Times:
        forward_s, sampler_s = self.watched.take()
        return {WHOLE: whole_s, FORWARD: forward_s, SAMPLER: sampler_s}

    def again(self) -> Times:
        """Runs the last step again, or the prompt's steps, with all its keys and without some; then its products. The
        keys and values that it stores are then wrong."""
        ran = self.watched.ran
        times = self._products(ran) | {AGAIN: self._run(ran)}
        if ran[0].attention.prompts:
            few = [without_prompts(one.attention) for one in ran]
        else:
            tails = [without_trunks(one.attention) for one in ran]
            times[NO_TRUNKS] = self._run([replace(one, attention=plan) for one, plan in zip(ran, tails, strict=True)])
            few = [without_tails(plan) for plan in tails]
        times[NO_KEYS] = self._run([replace(one, attention=plan) for one, plan in zip(ran, few, strict=True)])
        return times

    def _run(self, steps: Sequence[StepInputs]) -> float:
        begin = self.clock()
        for inputs in steps:
            self.runner.run(inputs)
        return self.clock() - begin

    def _products(self, steps: Sequence[StepInputs]) -> Times:
        times: defaultdict[str, float] = defaultdict(float)
        multiply, handle = self.kernels.motet_multiply, self.handle
        for inputs in steps:
            calls = [*self._calls(inputs)]
            x = {
                depth: torch.randn(len(inputs.slots), depth).bfloat16() for depth in {one.depth for _, one, _ in calls}
            }
            y = torch.zeros(max(rows * linear.columns for _, linear, rows in calls))
            for name, linear, rows in calls:
                arguments = (handle, ctypes.byref(linear), x[linear.depth].data_ptr(), rows, y.data_ptr())
                begin = self.clock()
                multiply(*arguments)
                times[name] += self.clock() - begin
        return dict(times)

    def _calls(self, inputs: StepInputs) -> Iterator[tuple[str, c.PackedLinear, int]]:
        """Yields the name, the weights and the number of rows of each product of a step. After the last layer's first
        product only rows whose logits are wanted go on."""
        layers = self.model.layers
        for number, layer in enumerate(layers, 1):
            for name in PRODUCTS:
                last = number == len(layers) and name != "qkv"
                rows = len(set(inputs.logit_rows[: inputs.num_logits])) if last else len(inputs.slots)
                if rows:
                    yield PRODUCT.format(name), getattr(layer, name), rows
        if inputs.num_logits:
            yield HEAD, self.model.struct.head, inputs.num_logits

    def works(self) -> dict[str, Work]:
        """Returns what the parts of the last step, or of the prompt's steps, must cost."""
        works: defaultdict[str, Work] = defaultdict(Work)
        for inputs in self.watched.ran:
            for name, linear, rows in self._calls(inputs):
                weights = linear.depth * linear.columns
                works[name] += Work(2.0 * weights, 2.0 * rows * weights)
            for name, keys, seen in reads_of(inputs.attention):
                works[name] += self._attention(keys, seen, layers=len(self.model.layers) - (name == PROMPT))
        return dict(works)

    def _attention(self, keys: int, seen: int, *, layers: int) -> Work:
        """`keys` are read, once; `seen` counts each as often as there is a row that sees it. A prompt does without its
        last layer's, but for a row."""
        struct = self.model.struct
        bytes_of_key = 2.0 * 2 * struct.kv_heads * struct.head_dim
        operations_of_key = 4.0 * struct.heads * struct.head_dim
        return Work(layers * keys * bytes_of_key, layers * seen * operations_of_key)


def parts_from(times: Times) -> Times:
    """Returns the seconds of every part, of the forward pass and of the whole step, from what was timed."""
    products = {name: seconds for name, seconds in times.items() if name.startswith(PRODUCT.format(""))}
    attention = (
        {TRUNK: times[AGAIN] - times[NO_TRUNKS], TAIL: times[NO_TRUNKS] - times[NO_KEYS]}
        if NO_TRUNKS in times
        else {PROMPT: times[AGAIN] - times[NO_KEYS]}
    )
    return {
        **products,
        **attention,
        REST: times[NO_KEYS] - sum(products.values()),
        SAMPLER: times[SAMPLER],
        PYTHON: times[WHOLE] - times[FORWARD] - times[SAMPLER],
        FORWARD: times[FORWARD],
        WHOLE: times[WHOLE],
    }


def reads_of(plan: AttentionPlan) -> Iterator[tuple[str, int, int]]:
    """Yields the part, the keys that are read, and the sum over rows of the keys that they see."""
    for trunk in plan.trunks:
        yield TRUNK, trunk.num_keys, trunk.num_keys * (trunk.end - trunk.begin)
    for tail in plan.tails:
        for offset in tail.first_offsets:
            last = offset + tail.rows_per_piece
            yield TAIL, last, sum(range(offset + 1, last + 1))
    for prompt in plan.prompts:
        first, rows = prompt.first_position, prompt.end - prompt.begin
        yield PROMPT, first + rows, rows * first + rows * (rows + 1) // 2


def without_trunks(plan: AttentionPlan) -> AttentionPlan:
    return replace(plan, trunks=tuple(replace(trunk, num_keys=0, table=()) for trunk in plan.trunks))


def without_tails(plan: AttentionPlan) -> AttentionPlan:
    """Leaves each tail its first key."""
    tails = tuple(replace(tail, first_offsets=(0,) * len(tail.first_offsets)) for tail in plan.tails)
    return replace(plan, tails=tails)


def without_prompts(plan: AttentionPlan) -> AttentionPlan:
    """Leaves the rows of prompts a few keys."""
    return replace(plan, prompts=tuple(few for prompt in plan.prompts for few in _cut(prompt)))


def _cut(prompt: PromptRead) -> Iterator[PromptRead]:
    edges = [*range(prompt.begin, prompt.end, FEW_ROWS), prompt.end]
    for begin, end in pairwise(edges):
        yield replace(prompt, begin=begin, end=end, first_position=0, num_keys=end - begin)
