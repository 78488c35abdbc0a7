"""The `system_fingerprint` of an engine, and the check that torch's operators are batch-invariant on this machine.

With the padding of `attention.attention_plan`, this needs two properties: a row of a matrix product has the same bits
with 4, 8 or 64 rows, and a row of attention has the same bits in any chunk and next to any siblings. Both hold for
torch 2.13 on every x86 CPU that was tested. The check is cheap, so the engine runs it at every start.
"""

import json
import platform
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

import motet
from motet.engines.native.attention.attention_plan import STRETCH, padded_keys, pieces
from motet.engines.native.attention.group_attention import flash_cpu

SAME, NOT_SAME = "same", "similar"
MODEL_DIGITS = 16

NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of a configuration that can differ between two copies of a model."""


def model_digest(config: PreTrainedConfig, weights: str) -> str:
    """Returns a digest of a model's configuration and saved weights, which does not depend on the engine's dtype.
    `weights`: digest of the weights."""
    fields = {name: value for name, value in config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    content = json.dumps(fields, sort_keys=True, default=str) + weights
    return blake2b(content.encode(), digest_size=16).hexdigest()


def fingerprint(operators: str, same: bool, *, dtype: torch.dtype, device: torch.device, model: str) -> str:
    """Returns a name such as `motet-0.1.0_model-5e0c41d2a87f1b36_torch-2.13.0_x86_64-AVX512_bfloat16-same`. Engines
    with equal fingerprints that end in `-same` generate the same tokens for a choice. `model`: digest of the model."""
    if device.type == "cpu":
        where = torch.backends.cpu.get_cpu_capability()
    else:
        where = torch.cuda.get_device_name(device).replace(" ", "-")
    kind = f"{platform.machine()}-{where}_{str(dtype).removeprefix('torch.')}"
    return f"motet-{motet.__version__}_model-{model[:MODEL_DIGITS]}_{operators}_{kind}-{SAME if same else NOT_SAME}"


def operators_agree(model: torch.nn.Module, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if torch's operators are batch-invariant; False on a GPU, where this is not checked."""
    return (
        device.type == "cpu"
        and linears_agree(model)
        and prompts_agree(head_dim, dtype)
        and trunks_agree(head_dim, dtype)
    )


@torch.inference_mode()
def linears_agree(model: torch.nn.Module, *, counts: Sequence[int] = (4, 12), rows: int = 32) -> bool:
    """Returns True if, for every shape of a product's weights, a row has the same bits with `counts` rows as with
    `rows` rows."""
    checked: set[tuple[int, ...]] = set()
    generator = torch.Generator().manual_seed(0)
    for weight in product_weights(model):
        if (kind := (*weight.shape, weight.stride(-1), weight.itemsize)) in checked:
            continue
        checked.add(kind)
        x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
        full = F.linear(x, weight)
        for count in counts:
            if not torch.equal(F.linear(x[4 : 4 + count], weight), full[4 : 4 + count]):
                return False
    return True


def product_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the weights [columns, depth] of a model's products: for experts the weights of one expert per layer, for
    routers also the weights in float32, in which some families compute them."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            yield module.weight
        elif not isinstance(module, torch.nn.Embedding):
            for weight in module.parameters(recurse=False):
                if weight.dim() == 3:
                    yield weight[0].t() if getattr(module, "is_transposed", False) else weight[0]
                elif weight.dim() == 2:
                    yield from (weight, weight.float())


@torch.inference_mode()
def prompts_agree(head_dim: int, dtype: torch.dtype, *, length: int = 640) -> bool:
    """Returns True if prompt rows have the same bits in one pass over `length` positions and in uneven chunks."""
    generator = torch.Generator().manual_seed(0)
    span = padded_keys(length)
    query, key, value = (torch.randn(1, 2, span, head_dim, generator=generator).to(dtype) for _ in range(3))

    def run(begin: int, end: int) -> torch.Tensor:
        outputs = []
        for first, last, keys in pieces(begin, end):
            visible = torch.arange(keys)[None, :] <= torch.arange(first, last)[:, None]
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))[None, None]
            outputs.append(
                flash_cpu(query[:, :, first:last], key[:, :, :keys], value[:, :, :keys], mask=mask, scale=0.125)[0]
            )
        return torch.cat(outputs, dim=2)

    full = run(0, length)
    return all(
        torch.equal(run(begin, min(length, begin + step)), full[:, :, begin : min(length, begin + step)])
        for step in (37, 100)
        for begin in range(0, length, step)
    )


@torch.inference_mode()
def trunks_agree(head_dim: int, dtype: torch.dtype, *, rows: int = 800) -> bool:
    """Returns True if a tail row that reads stretches of a trunk has the same bits alone and with `rows` rows, which
    torch divides differently, and if a stretch has the same bits alone and in a batch of stretches."""
    generator = torch.Generator().manual_seed(0)
    for stretches, length in ((1, 5), (1, 131), (1, 511), (3, STRETCH)):
        query = torch.randn(1, 2, rows, head_dim, generator=generator).to(dtype).repeat(stretches, 1, 1, 1)
        key, value = (torch.randn(stretches, 2, length, head_dim, generator=generator).to(dtype) for _ in range(2))
        full, full_lse = flash_cpu(query, key, value, mask=None, scale=0.125)
        for count, begin, end in ((1, 0, rows), (stretches, 0, 1), (1, 3, 6), (1, 0, 200), (stretches, 8, 24)):
            some = query[:count, :, begin:end]
            part, part_lse = flash_cpu(some, key[:count], value[:count], mask=None, scale=0.125)
            expected, expected_lse = full[:count, :, begin:end], full_lse[:count, :, begin:end]
            if not (torch.equal(part, expected) and torch.equal(part_lse, expected_lse)):
                return False
    return True
