"""Compares a backend with transformers' own eager attention, before it serves.

A model can have features that a backend does not know: a factor, a norm, or layers without RoPE. They do not raise an
error, but the logits are wrong. Therefore transformers computes a few random tokens in float32 when the model is loaded
(`reference_pass`), and each backend that could serve the model computes them too (`compare`).

The difference is relative: the root mean square of the difference of the logits, divided by the root mean square of the
logits. In float32 it is about 1e-5. In other dtypes it depends on the depth of the model, so a difference above `CLOSE`
is compared with the difference of transformers itself in that dtype (`rounding`).

In a mixture of experts, two experts can have nearly equal scores for a token, and rounding then selects another one.
For such models, the difference is the median of the tokens' differences, which a few such tokens do not change.

New weights are not compared: they have the names, shapes and dtypes of the model that was compared.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from motet.engines.native.attention.attention_plan import AttentionPlan, PromptRead, pieces
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.step.inputs import ROW_MULTIPLE, StepInputs
from motet.engines.native.step.run import ATTENTION_NAME, ModelRunner

NUM_TOKENS = 32
"""Maximum number of tokens to compare. A short context or KV cache reduces it."""
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Maximum difference that is accepted without computing `rounding`."""
INT8_ROUNDING = 0.1
"""Maximum difference that int8 weights can add."""
MAX_RATIO = 2.0
"""Maximum ratio of a backend's difference to `rounding`."""
BLOCK_WEIGHTS = 2**20
"""Number of weights of a linear layer that are converted to float32 at a time. They stay in the processor's cache."""


@dataclass(frozen=True)
class ReferencePass:
    """The results of transformers in float32 for a few random tokens."""

    tokens: list[int]
    logits: Tensor
    """[tokens, vocabulary] float32."""
    keys: Sequence[Tensor]
    """Keys of each layer, [kv_heads, tokens, head_dim] float32."""
    difference: Callable[[Tensor, Tensor], float]
    """`difference_of` or `median_difference`."""


@dataclass(frozen=True)
class Comparison:
    """The differences of a backend from the reference, relative to the reference. NaN for numbers that are not
    finite."""

    logits: float
    keys: Sequence[float]
    """Difference of the keys of each layer. Empty if transformers caches something else (latent attention)."""
    same: bool
    """True if the logits had the same bits in two chunks and in one."""

    def agrees(self, limit: float) -> bool:
        return self.logits <= limit

    def description(self, limit: float) -> str:
        """Returns a clause about the difference. If it exceeds the limit, the clause names the first part of the model
        whose results differ: the keys of a layer depend on the layers before it."""
        words = f"the logits differ from transformers' in float32 by {self.logits:.1g} (relative RMS)"
        if self.agrees(limit) or not self.keys:
            return words
        layer = next((number for number, keys in enumerate(self.keys) if not keys <= limit), len(self.keys))
        return f"{words}, from {f'layer {layer - 1}' if layer else 'the embedding or the keys of layer 0'} on"


@torch.inference_mode()
def reference_pass(
    model: PreTrainedModel, *, num_tokens: int, vocab_size: int, by_median: bool = False
) -> ReferencePass:
    """Computes the reference. `model` must have all its weights, as loaded. `by_median`: True for
    `median_difference`."""
    tokens = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    with in_float32(model):
        logits, keys = _run(model, tokens)
    return ReferencePass(tokens, logits, keys, median_difference if by_median else difference_of)


@torch.inference_mode()
def rounding(model: PreTrainedModel, reference: ReferencePass) -> float:
    """Returns the difference of transformers itself in the dtype of the model."""
    logits, _ = _run(model, reference.tokens)
    return reference.difference(logits, reference.logits)


def _run(model: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Returns the logits, and the keys of each layer, with transformers' own attention and experts."""
    cache, experts = DynamicCache(), model.get_experts_implementation()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        output = model(input_ids=torch.tensor([tokens], device=model.device), past_key_values=cache, use_cache=True)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        model.set_experts_implementation(experts)
    keys = [layer.keys for layer in cache.layers if isinstance(layer, DynamicLayer)]
    return output.logits[0].float().cpu(), [each[0].float().cpu() for each in keys if each is not None]


def difference_of(found: Tensor, expected: Tensor) -> float:
    """Returns the relative difference of logits [tokens, vocabulary]. A constant that is added to a row does not count,
    because it changes no probability."""
    found, expected = (each - each.mean(-1, keepdim=True) for each in (found, expected))
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def median_difference(found: Tensor, expected: Tensor) -> float:
    """Returns the median of the relative differences of the tokens. NaN if one of them is NaN."""
    differences = [difference_of(one, other) for one, other in zip(found, expected, strict=True)]
    return float(torch.tensor(differences).median())


@torch.inference_mode()
def compare(runner: ModelRunner, reference: ReferencePass, *, storage: KVStorage) -> Comparison:
    """Runs the tokens of the reference in three chunks, which detects layers with a state outside of the KV cache, and
    then in one, which detects kernels that sum in another order. The last chunk has one token, as a step of one choice.
    Uses the first blocks of the KV cache, and fills them with zeros afterwards."""
    count = len(reference.tokens)
    table = [*range(-(-count // storage.block_size))]

    def run(begin: int, end: int) -> Tensor:
        positions, rows = [*range(begin, end)], [*range(end - begin)]
        reads = [PromptRead(at - begin, last - begin, at, keys, table) for at, last, keys in pieces(begin, end)]
        # Matrix products get a multiple of 4 rows, as in all steps (`step.inputs`).
        padding = [0] * (-len(rows) % ROW_MULTIPLE)
        tokens = reference.tokens[begin:end] + padding
        plan = AttentionPlan(0, tuple(reads), (), ())
        logits = runner.run(StepInputs(tokens, positions + padding, positions, rows + padding, len(rows), [], [], plan))
        runner.settle()
        return logits[: len(rows)].to("cpu", torch.float32, copy=True)  # the next run overwrites them

    bounds = sorted({0, count * 3 // 7, count - 1, count})
    chunks = torch.cat([run(begin, end) for begin, end in pairwise(bounds)])
    keys = storage.keys[:, :count].transpose(1, 2).float().cpu()
    found = Comparison(
        reference.difference(chunks, reference.logits),
        [difference_of(one.flatten(1), other.flatten(1)) for one, other in zip(keys, reference.keys, strict=True)]
        if all(one.shape == other.shape for one, other in zip(keys, reference.keys, strict=True))
        else [],
        same=torch.equal(run(0, count), chunks),
    )
    slots = len(table) * storage.block_size
    storage.keys[:, :slots], storage.values[:, :slots] = 0, 0
    return found


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Makes a model compute in float32 with weights of its own dtype. The weights of linear layers are converted in
    blocks, and other parameters for one decoder layer at a time, into the same memory for all of them: new memory for
    each layer would take longer than the products."""
    layers, others = _parts(model)
    products = {
        module: module.weight
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype != torch.float32
    }
    with ExitStack() as stack:
        if products:
            most = max(weight.shape[1] for weight in products.values())
            block = next(iter(products.values())).new_empty(max(BLOCK_WEIGHTS, most), dtype=torch.float32)
            for product in products:
                stack.enter_context(_product_in_blocks(product, block))
        shared: Copies = {}
        without = {id(weight) for weight in products.values()}
        handles = [handle for layer in layers for handle in _converted(layer, shared, without=without)]
        for module in others:
            if isinstance(module, nn.Embedding):
                handles.append(module.register_forward_hook(lambda module, args, output: output.float()))
            else:
                handles += _converted(module, {}, without=without)
        for handle in handles:
            stack.callback(handle.remove)
        yield


def _parts(model: nn.Module) -> tuple[nn.ModuleList, list[nn.Module]]:
    """Returns the decoder layers, and all modules with parameters outside of them."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=lambda found: sum(parameter.numel() for parameter in found.parameters()))
    inside = {id(module) for module in layers.modules()}
    outside = (module for module in model.modules() if id(module) not in inside)
    return layers, [module for module in outside if next(module.parameters(recurse=False), None) is not None]


Copies = dict[tuple[int, torch.Size], Tensor]
"""Memory for parameters in float32, by their place in the module and their shape."""


def _converted(module: nn.Module, copies: Copies, *, without: Collection[int]) -> list[RemovableHandle]:
    """Converts the parameters of a module to float32 while it computes, except those whose ids are in `without`."""
    saved: list[tuple[nn.Parameter, Tensor]] = []
    parameters = [parameter for parameter in module.parameters() if id(parameter) not in without]

    def before(*_: object) -> None:
        saved.extend((parameter, parameter.data) for parameter in parameters)
        for number, (parameter, numbers) in enumerate(saved):
            if numbers.dtype != torch.float32:
                place = number, numbers.shape
                if place not in copies:
                    copies[place] = torch.empty_like(numbers, dtype=torch.float32)
                parameter.data = copies[place].copy_(numbers)

    def after(*_: object) -> None:
        for parameter, numbers in saved:
            parameter.data = numbers
        saved.clear()

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


@contextmanager
def _product_in_blocks(linear: nn.Linear, block: Tensor) -> Iterator[None]:
    """Makes a linear layer convert its weights to float32 block by block. `block`: memory for one of them."""

    num_columns = max(1, len(block) // linear.in_features)

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, linear.in_features)
        product = rows.new_empty(len(rows), linear.out_features)
        blocks = zip(torch.split(linear.weight, num_columns), torch.split(product, num_columns, 1), strict=True)
        for weights, columns in blocks:
            converted = block[: weights.numel()].view(weights.shape).copy_(weights)
            torch.mm(rows, converted.T, out=columns)
        if linear.bias is not None:
            product += linear.bias
        return product.view(*x.shape[:-1], linear.out_features)

    linear.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del linear.forward
