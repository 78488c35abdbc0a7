"""The compiled kernels, as `csrc/model.h` and `csrc/api.cpp` declare them; built at install, if a compiler is there."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_void_p
from functools import cache
from hashlib import blake2b
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


class Linear(Structure):
    _fields_ = (*((name, c_void_p) for name in ("panels", "scales", "bias")), ("columns", c_int32), ("depth", c_int32))


class Layer(Structure):
    _fields_ = (
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "cosines", "sines", "keys", "values")),
        ("window", c_int32),
        ("score_scale", c_float),
        ("score_softcap", c_float),
    )


class Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, c_int32) for name in ("vocab", "block_size", "activation")),
        *((name, c_float) for name in ("epsilon", "logit_softcap", "embedding_scale")),
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("head", Linear),
        ("final_norm", c_void_p),
    )


class Batch(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_spans", "num_logits")),
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "spans", "pieces", "tables")),
        *((name, c_void_p) for name in ("logit_rows", "logits", "sick")),
    )


PIECE_INTS = 4
"""row_begin, row_end, first, table"""
SPAN_INTS = 6
"""row_begin, row_end, piece_begin, piece_end, trunk_keys, trunk_table"""

SILU, GELU_TANH = 0, 1
PANEL = 32
"""Columns of a packed panel; every dimension of a model must be a multiple of it."""


KINDS = ("avx512", "avx2")
"""Of processors that kernels are compiled for, the faster one first."""


def library() -> ctypes.CDLL | None:
    """The kernels, or None: none were built, or this processor lacks an instruction they need."""
    kind = _kind()
    return None if kind is None else of_kind(kind)


def digest() -> str:
    """Of the kernels as they were built here: another compiler may round elsewhere."""
    kind = _kind()
    path = None if kind is None else _path(kind)
    return "" if path is None else blake2b(path.read_bytes(), digest_size=4).hexdigest()


@cache
def of_kind(kind: str) -> ctypes.CDLL | None:
    """The kernels for one of `KINDS`, or None."""
    if (path := _path(kind)) is None:
        return None
    kernels = _declared(ctypes.CDLL(str(path)))
    return kernels if kernels.motet_supported() else None


def _kind() -> str | None:
    return next((kind for kind in KINDS if of_kind(kind) is not None), None)


def _path(kind: str) -> Path | None:
    paths = (Path(__file__).with_name(f"compiled_{kind}{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.motet_supported.restype = c_int32
    found.motet_pack.argtypes = (c_void_p, c_void_p, c_void_p, c_int32, c_int32)
    found.motet_pack.restype = None
    found.motet_open.argtypes = (POINTER(Model), c_int32)
    found.motet_open.restype = c_void_p
    found.motet_run.argtypes = (c_void_p, POINTER(Batch))
    found.motet_run.restype = None
    found.motet_multiply.argtypes = (c_void_p, POINTER(Linear), c_void_p, c_int32, c_void_p)
    found.motet_multiply.restype = None
    found.motet_close.argtypes = (c_void_p,)
    found.motet_close.restype = None
    sizes = (c_int32 * 6)()
    found.motet_sizes(sizes)
    ours = [*map(ctypes.sizeof, (Linear, Layer, Model, Batch)), 4 * PIECE_INTS, 4 * SPAN_INTS]
    if list(sizes) != ours:
        raise ImportError(f"the kernels were built from other sources (structs of {list(sizes)} bytes, not {ours})")
    return found
