"""Times the parts of a step of the default model, and counts the bytes and operations that each part needs.

Nothing is timed inside the kernels. The cost of a part is measured from outside: every product is called separately, in
the order of the layers, so that its weights come from memory. A step that the engine has run is run again without its
trunk, and with only one key of each tail; the differences are the costs of attention.
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
from motet.settings.engine_config import EngineConfig
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
STEP, FORWARD = "step", "forward"
AGAIN, NO_TRUNKS, NO_KEYS = "again", "without trunks", "without keys"
"""Variants in which a step is run again."""
FEW_ROWS = 32
"""Number of rows of a prompt that attend only to each other in place of its attention: a few percent of it remain."""
ID = RequestId("roofline")
Clock = Callable[[], float]


@dataclass(frozen=True)
class PartWork:
    """The work that a part must do at least."""

    bytes_read: float = 0.0
    """Bytes of weights, keys and values, each read once."""
    operations: float = 0.0
    """Number of multiplications and additions."""

    def __add__(self, other: "PartWork") -> "PartWork":
        return PartWork(self.bytes_read + other.bytes_read, self.operations + other.operations)


Times = dict[str, float]
"""Seconds by part."""


class WatchedRunner:
    """A runner that stores its inputs, and the times at which it started, had logits, and was called to verify."""

    def __init__(self, runner: CpuRunner, clock: Clock) -> None:
        self.device, self.copy_slots, self.settle = runner.device, runner.copy_slots, runner.settle
        self._runner, self._clock = runner, clock
        self.ran: list[StepInputs] = []
        self.forward_s = self.sampler_s = self._left_s = 0.0

    @property
    def trunk_tokens_saved(self) -> int:
        return self._runner.trunk_tokens_saved

    def run(self, inputs: StepInputs) -> torch.Tensor:
        self.ran.append(inputs)
        begin = self._clock()
        logits = self._runner.run(inputs)
        self._left_s = self._clock()
        self.forward_s += self._left_s - begin
        return logits

    def verify(self) -> None:
        """Called by the engine after it has sampled the tokens."""
        self.sampler_s += self._clock() - self._left_s
        self._runner.verify()

    def take(self) -> tuple[float, float]:
        """Returns the seconds of forward passes and of sampling since the last call."""
        taken = self.forward_s, self.sampler_s
        self.forward_s = self.sampler_s = 0.0
        return taken


class MeasuredEngine:
    """An engine on this machine's CPU, whose kernels can also be called separately."""

    def __init__(
        self, folder: Path, *, threads: int, max_choices: int, prompt_tokens: int, steps: int, kv_cache_gb: float = 2.0
    ) -> None:
        """`steps` is the maximum number of tokens of each choice."""
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
            max_num_seqs=max_choices,
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
        self.watched = WatchedRunner(parts.runner, self.clock)
        self.core = EngineCore(parts.info, self.watched, options=parts.options)
        self.kernels = kernels
        self.handle = kernels.motet_open(ctypes.byref(self.model.struct), threads)

    def close(self) -> None:
        self.kernels.motet_close(self.handle)

    def start(self, n: int) -> Times:
        """Computes a new prompt for n choices, and returns its times."""
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
        """Takes one step, and keeps only the inputs of this step."""
        self.watched.ran.clear()
        begin = self.clock()
        self.core.step()
        return self._split(self.clock() - begin)

    def _split(self, step_s: float) -> Times:
        forward_s, sampler_s = self.watched.take()
        return {STEP: step_s, FORWARD: forward_s, SAMPLER: sampler_s}

    def again(self) -> Times:
        """Runs the last step again, or the steps of the prompt, with all keys and without some, and times its products.
        The keys and values that it stores are wrong afterwards."""
        ran = self.watched.ran
        times = self._products(ran) | {AGAIN: self._run(ran)}
        if ran[0].attention.prompts:
            few = [without_prompts(inputs.attention) for inputs in ran]
        else:
            tails = [without_trunks(inputs.attention) for inputs in ran]
            steps = [replace(inputs, attention=plan) for inputs, plan in zip(ran, tails, strict=True)]
            times[NO_TRUNKS] = self._run(steps)
            few = [without_tails(plan) for plan in tails]
        times[NO_KEYS] = self._run([replace(inputs, attention=plan) for inputs, plan in zip(ran, few, strict=True)])
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
            depths = {linear.depth for _, linear, _ in calls}
            x = {depth: torch.randn(len(inputs.slots), depth).bfloat16() for depth in depths}
            y = torch.zeros(max(rows * linear.columns for _, linear, rows in calls))
            for name, linear, rows in calls:
                arguments = (handle, ctypes.byref(linear), x[linear.depth].data_ptr(), rows, y.data_ptr())
                begin = self.clock()
                multiply(*arguments)
                times[name] += self.clock() - begin
        return dict(times)

    def _calls(self, inputs: StepInputs) -> Iterator[tuple[str, c.PackedLinear, int]]:
        """Yields the name, the weights and the number of rows of each product of a step. After the first product of the
        last layer, only rows whose logits are needed continue."""
        layers = self.model.layers
        for number, layer in enumerate(layers, 1):
            for name in PRODUCTS:
                last = number == len(layers) and name != "qkv"
                rows = len(set(inputs.logit_rows[: inputs.num_logits])) if last else len(inputs.slots)
                if rows:
                    yield PRODUCT.format(name), getattr(layer, name), rows
        if inputs.num_logits:
            yield HEAD, self.model.struct.head, inputs.num_logits

    def works(self) -> dict[str, PartWork]:
        """Returns the necessary work of the parts of the last step, or of the steps of the prompt."""
        works: defaultdict[str, PartWork] = defaultdict(PartWork)
        for inputs in self.watched.ran:
            for name, linear, rows in self._calls(inputs):
                weights = linear.depth * linear.columns
                works[name] += PartWork(2.0 * weights, 2.0 * rows * weights)
            for name, keys, attended in reads_of(inputs.attention):
                works[name] += self._attention(keys, attended, layers=len(self.model.layers) - (name == PROMPT))
        return dict(works)

    def _attention(self, keys: int, attended: int, *, layers: int) -> PartWork:
        """Returns the work to read `keys` once. `attended` counts a key once for each row that attends to it. A prompt
        skips the attention of its last layer, except for one row."""
        struct = self.model.struct
        bytes_of_key = 2.0 * 2 * struct.kv_heads * struct.head_dim
        operations_of_key = 4.0 * struct.heads * struct.head_dim
        return PartWork(layers * keys * bytes_of_key, layers * attended * operations_of_key)


def parts_from(times: Times) -> Times:
    """Returns the seconds of every part, of the forward pass and of the entire step, from the measured times."""
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
        PYTHON: times[STEP] - times[FORWARD] - times[SAMPLER],
        FORWARD: times[FORWARD],
        STEP: times[STEP],
    }


def reads_of(plan: AttentionPlan) -> Iterator[tuple[str, int, int]]:
    """Yields the part, the number of keys that are read, and the sum over rows of the keys to which they attend."""
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
    """Keeps only the first key of each tail."""
    tails = tuple(replace(tail, first_offsets=(0,) * len(tail.first_offsets)) for tail in plan.tails)
    return replace(plan, tails=tails)


def without_prompts(plan: AttentionPlan) -> AttentionPlan:
    """Keeps only a few keys for the rows of prompts."""
    return replace(plan, prompts=tuple(few for prompt in plan.prompts for few in _cut(prompt)))


def _cut(prompt: PromptRead) -> Iterator[PromptRead]:
    edges = [*range(prompt.begin, prompt.end, FEW_ROWS), prompt.end]
    for begin, end in pairwise(edges):
        yield replace(prompt, begin=begin, end=end, first_position=0, num_keys=end - begin)
