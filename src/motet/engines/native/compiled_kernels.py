"""The compiled kernels, as `csrc/model.h` and `csrc/api.cpp` declare them. The installation builds them if it can."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_uint64, c_void_p
from functools import cache
from hashlib import blake2b
from pathlib import Path


class PackedLinear(Structure):
    _fields_ = (*((name, c_void_p) for name in ("panels", "scales", "bias")), ("columns", c_int32), ("depth", c_int32))


class Layer(Structure):
    _fields_ = (
        *((name, PackedLinear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "cosines", "sines", "keys", "values")),
        ("window", c_int32),
        ("score_scale", c_float),
        ("score_softcap", c_float),
    )


class Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, c_int32) for name in ("vocab", "block_size", "numbers", "activation")),
        *((name, c_float) for name in ("epsilon", "logit_softcap", "embedding_scale")),
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("head", PackedLinear),
        ("final_norm", c_void_p),
    )


class KernelBatch(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_spans", "num_logits")),
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "spans", "pieces", "tables")),
        *((name, c_void_p) for name in ("logit_rows", "logits", "sick", "trunk_keys_read")),
    )


class SamplingArguments(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_choices", "vocab", "stride", "most_best", "num_named")),
        *((name, c_void_p) for name in ("logits", "rows", "temperature", "top_k", "top_p", "log_min_p")),
        *((name, c_void_p) for name in ("uniform", "seeds", "positions", "best", "named")),
        *((name, c_void_p) for name in ("tokens", "finite", "last_logit", "last_id", "scores")),
    )


PIECE_INTS = 4
"""row_begin, row_end, first, table"""
SPAN_INTS = 6
"""row_begin, row_end, piece_begin, piece_end, trunk_keys, trunk_table"""

BF16, FLOAT32 = 0, 1
SILU, GELU_TANH = 0, 1
PANEL = 32
"""Columns of a packed panel; every dimension of a model must be a multiple of it."""

KINDS = ("avx512", "avx2")
"""Kinds of processors that kernels are compiled for, the faster one first."""


def library() -> ctypes.CDLL | None:
    """Returns the kernels; None if none were built, or this processor lacks an instruction they need."""
    return next((kernels for kind in KINDS if (kernels := of_kind(kind)) is not None), None)


def digest() -> str:
    """Names this build of the kernels: another compiler may round in other places."""
    path = next((_path(kind) for kind in KINDS if of_kind(kind) is not None), None)
    return "" if path is None else blake2b(path.read_bytes(), digest_size=4).hexdigest()


def file_name(kind: str) -> str:
    """Names the library of a kind; it is the same file for every Python, as `setup.py` says."""
    return f"compiled_{kind}.abi3.so"


@cache
def of_kind(kind: str) -> ctypes.CDLL | None:
    """Returns the kernels for one of `KINDS`; None if they were not built or cannot run here."""
    if (path := _path(kind)) is None:
        return None
    kernels = _declared(ctypes.CDLL(str(path)))
    return kernels if kernels.motet_supported() else None


def _path(kind: str) -> Path | None:
    path = Path(__file__).parent / "cpu" / file_name(kind)
    return path if path.is_file() else None


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the functions their types. Raises ImportError if the structs are not those of the sources."""
    sizes = (c_int32 * 7)()
    found.motet_sizes(sizes)
    structs = PackedLinear, Layer, Model, KernelBatch
    ours = [*map(ctypes.sizeof, structs), 4 * PIECE_INTS, 4 * SPAN_INTS, ctypes.sizeof(SamplingArguments)]
    if list(sizes) != ours:
        raise ImportError(f"the kernels were built from other sources (structs of {list(sizes)} bytes, not {ours})")
    found.motet_supported.restype = c_int32
    found.motet_pack.argtypes = (c_int32, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32)
    found.motet_pack.restype = None
    found.motet_open.argtypes = (POINTER(Model), c_int32)
    found.motet_open.restype = c_void_p
    found.motet_run.argtypes = (c_void_p, POINTER(KernelBatch))
    found.motet_run.restype = None
    found.motet_multiply.argtypes = (c_void_p, POINTER(PackedLinear), c_void_p, c_int32, c_void_p)
    found.motet_multiply.restype = None
    found.motet_read_memory.argtypes = (c_void_p, c_void_p, c_uint64)
    found.motet_read_memory.restype = c_uint64
    found.motet_multiply_tiles.argtypes = (c_void_p, c_int32)
    found.motet_multiply_tiles.restype = c_double
    found.motet_close.argtypes = (c_void_p,)
    found.motet_close.restype = None
    found.motet_open_draws.argtypes = (c_int32, c_int32)
    found.motet_open_draws.restype = c_void_p
    found.motet_draw.argtypes = (c_void_p, POINTER(SamplingArguments))
    found.motet_draw.restype = None
    found.motet_close_draws.argtypes = (c_void_p,)
    found.motet_close_draws.restype = None
    return found
