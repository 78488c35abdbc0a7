"""Every shape of tile compiles for an H100 and fits it. Triton's compiler needs no GPU: run `make triton`."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.engines.native.cuda.where import INTERPRETED, TRITON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not TRITON, reason="needs Triton: make triton"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler: run it without TRITON_INTERPRET"),
]

SHARED_BYTES = 227 * 1024
"""Shared memory that a multiprocessor of an H100 gives one program."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
BY_16 = ("query", "keys", "values", "output", "items", "tables", "slot_stride")
"""Arguments divisible by 16, so that memory can be read 16 bytes at a time."""


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("block_m", "final"),
    [(16, False), (32, False), (64, False), (64, True)],
    ids=["narrow", "many query heads", "wide", "final"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("windowed", "capped"), [(False, False), (True, True)], ids=["plain", "window and cap"])
def test_tiles_compile_and_fit(
    dtype: torch.dtype, block_m: int, final: bool, head_dim: int, windowed: bool, capped: bool
) -> None:
    flags = {"WINDOWED": windowed, "CAPPED": capped, "FINAL": final}
    assembly, shared_bytes = compiled(dtype, block_m, head_dim, flags)
    assert shared_bytes <= SHARED_BYTES
    assert "cp.async" in assembly, "keys are fetched while earlier ones are computed"
    assert ("wgmma" if block_m >= 64 else "mma.sync") in assembly, "products run on the matrix units"


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_float32_tiles_compile_and_fit(head_dim: int) -> None:
    flags = {"WINDOWED": False, "CAPPED": False, "FINAL": False}
    assembly, shared_bytes = compiled(torch.float32, 16, head_dim, flags)
    assert shared_bytes <= SHARED_BYTES
    assert "mma" not in assembly, "float32 is summed exactly, not in the matrix units' shorter format"


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("name", ["rotate_rows", "merge_parts", "norm_rows", "gate_rows"])
def test_the_other_kernels_compile(name: str, normed: bool) -> None:
    from motet.engines.native.cuda import kernels

    constants = {
        "rotate_rows": {"HEAD_DIM": 128, "BLOCK_D": 128, "NORMED": normed, "LAST": True},
        "merge_parts": {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_P": 16},
        "norm_rows": {"BLOCK": 4096},
        "gate_rows": {"BLOCK": 1024, "GELU": normed},
    }
    floats = dict.fromkeys(("epsilon", "key_limit", "value_limit"), "fp32")
    pointers = dict.fromkeys(("query_norm", "key_norm", "parts", "lse", "weight"), "*fp32")
    pointers |= dict.fromkeys(("slots", "non_finite", "first_part"), "*i32")
    halves = ("projected", "cosines", "sines", "query", "keys", "values", "output", "x")
    pointers |= dict.fromkeys(halves, "*bf16")
    kernel = getattr(kernels, name)
    assert built(kernel, constants[name], floats | pointers, num_warps=4, num_stages=1)[1] <= SHARED_BYTES


def compiled(dtype: torch.dtype, block_m: int, head_dim: int, flags: dict[str, bool]) -> tuple[str, int]:
    """Returns a tile's PTX for an H100, and its bytes of shared memory."""
    from motet.engines.native.cuda.kernels import attend_tiles
    from motet.engines.native.cuda.launch import head_sizes, tile_shape

    options, name = tile_shape(block_m, head_dim, dtype=dtype), NAMES[dtype]
    constants = {
        **head_sizes(head_dim),
        "HEADS_PER_KV_HEAD": 4,
        "BLOCK_SIZE": 16,
        "BLOCK_M": block_m,
        "BLOCK_N": options.pop("BLOCK_N"),
        **flags,
    }
    types = {"scale": "fp32", "softcap": "fp32", "output": f"*{name if flags['FINAL'] else 'fp32'}", "lse": "*fp32"}
    types |= dict.fromkeys(("query", "keys", "values"), f"*{name}")
    types |= dict.fromkeys(("items", "tables", "positions", "first_part"), "*i32")
    return built(attend_tiles, constants, types, **options)


def built(kernel: Any, constants: Mapping[str, int], types: Mapping[str, str], **options: int) -> tuple[str, int]:
    """Returns PTX and shared bytes; an argument that is neither a constant nor named in `types` is an int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    by_16 = {(names.index(name),): [["tt.divisibility", 16]] for name in BY_16 if name in names}
    source = ASTSource(kernel, signature, dict(constants), by_16)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return found.asm["ptx"], found.metadata.shared
