"""Every shape of tile compiles for an H100 and fits it. Triton's compiler needs no GPU for that: `make kernels`."""

import pytest
import torch

from tests.engines.native.cuda.where import INTERPRETED, TRITON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not TRITON, reason="needs Triton: make kernels"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler: run it without TRITON_INTERPRET"),
]

SHARED_BYTES = 227 * 1024
"""That a multiprocessor of an H100 gives one program."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS_16 = ("query", "keys", "values", "output", "items", "tables", "slot_stride", "query_row", "query_head")
"""Divisible by 16, which is what lets memory be read 16 bytes at a time."""


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("block_m", "final"), [(16, False), (64, False), (64, True)], ids=["narrow", "wide", "whole"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("windowed", "capped"), [(False, False), (True, True)], ids=["plain", "window and cap"])
def test_tiles_compile_and_fit(
    dtype: torch.dtype, block_m: int, final: bool, head_dim: int, windowed: bool, capped: bool
) -> None:
    flags = {"WINDOWED": windowed, "CAPPED": capped, "FINAL": final}
    assembly, shared_bytes = compiled(dtype, block_m, head_dim, flags)
    assert shared_bytes <= SHARED_BYTES
    assert "cp.async" in assembly, "keys are fetched while others are computed on"
    assert ("wgmma" if block_m >= 64 else "mma.sync") in assembly, "products run on the matrix units"


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_float32_tiles_compile_and_fit(head_dim: int) -> None:
    flags = {"WINDOWED": False, "CAPPED": False, "FINAL": False}
    assembly, shared_bytes = compiled(torch.float32, 16, head_dim, flags)
    assert shared_bytes <= SHARED_BYTES
    assert "mma" not in assembly, "float32 is summed exactly, not in the matrix units' shorter form of it"


def compiled(dtype: torch.dtype, block_m: int, head_dim: int, flags: dict[str, bool]) -> tuple[str, int]:
    """PTX for an H100, and the bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from motet.engines.native.cuda.kernels import attend_tiles
    from motet.engines.native.cuda.launch import padded_head_dim, tile_shape

    shape, name = tile_shape(block_m, head_dim, dtype), NAMES[dtype]
    constants = {
        "HEAD_DIM": head_dim,
        "SIBLINGS": 4,
        "BLOCK_SIZE": 16,
        "BLOCK_M": block_m,
        "BLOCK_N": shape.keys,
        "BLOCK_D": padded_head_dim(head_dim),
        **flags,
    }
    types = {"scale": "fp32", "softcap": "fp32", "output": f"*{name if flags['FINAL'] else 'fp32'}", "lse": "*fp32"}
    types |= dict.fromkeys(("query", "keys", "values"), f"*{name}")
    types |= dict.fromkeys(("items", "tables", "positions", "first_part"), "*i32")
    signature = {arg: types.get(arg, "constexpr" if arg in constants else "i32") for arg in attend_tiles.arg_names}
    places = [(attend_tiles.arg_names.index(arg),) for arg in POINTERS_16]
    source = ASTSource(attend_tiles, signature, constants, {place: [["tt.divisibility", 16]] for place in places})
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return kernel.asm["ptx"], kernel.metadata.shared
