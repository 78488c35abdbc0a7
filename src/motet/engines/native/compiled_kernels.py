"""Loads the compiled kernels, and declares their structs and functions as `csrc/model.h`, `csrc/sampling.h` and
`csrc/api.cpp` do. The installation builds the kernels if there is a compiler."""

import ctypes
import platform
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_uint64, c_void_p
from functools import cache
from hashlib import blake2b
from pathlib import Path

from motet.errors import StartupError
from motet.system.machine import processor


class PackedLinear(Structure):
    """`Linear` in C++: a packed product."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "scales", "bias")),
        *((name, c_int32) for name in ("columns", "depth", "number")),
    )


class LowRankPart(Structure):
    """`LowRank` in C++: the change of a product by an adapter."""

    _fields_ = (*((name, c_void_p) for name in ("down", "up", "windows")), ("width", c_int32))


class PackedNorm(Structure):
    """`Norm` in C++."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int32) for name in ("width", "stride")),
        ("epsilon", c_float),
        ("centered", c_int32),
    )


class Rotary(Structure):
    """`Rotary` in C++."""

    _fields_ = (*((name, c_void_p) for name in ("cosines", "sines")), ("dims", c_int32), ("adjacent", c_int32))


class PackedExperts(Structure):
    """`Experts` in C++."""

    _fields_ = (
        *((name, PackedLinear) for name in ("router", "gate_up", "down")),
        ("correction", c_void_p),
        *((name, c_int32) for name in ("count", "per_row", "groups", "top_groups", "scoring", "shared")),
        *((name, c_float) for name in ("min_total", "scale", "limit", "alpha")),
    )


class Layer(Structure):
    """`Layer` in C++."""

    _fields_ = (
        *((name, PackedLinear) for name in ("qkv", "out", "gate_up", "down")),
        ("experts", PackedExperts),
        *((name, PackedNorm) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")),
        *((name, PackedNorm) for name in ("query_norm", "key_norm")),
        ("rotary", Rotary),
        *((name, c_void_p) for name in ("sinks", "keys", "values")),
        ("window", c_int32),
        *((name, c_float) for name in ("score_scale", "score_softcap", "residual_scale")),
        *((name, c_int32) for name in ("activation", "gated", "parallel", "rotates_first")),
    )


class Model(Structure):
    """`Model` in C++."""

    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("vocab", "block_size", "dtype")),
        *((name, c_float) for name in ("logit_softcap", "logit_scale", "embedding_scale")),
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("head", PackedLinear),
        ("final_norm", PackedNorm),
    )


class KernelBatch(Structure):
    """`Batch` in C++: the inputs and outputs of a step."""

    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_spans", "num_logits", "num_groups")),
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "spans", "pieces", "tables")),
        *((name, c_void_p) for name in ("logit_rows", "logits", "non_finite")),
        *((name, c_void_p) for name in ("adapters", "low_ranks", "trunk_keys_read")),
    )


class SamplingArguments(Structure):
    """`SamplingArguments` in C++: the choices to sample, and their results."""

    _fields_ = (
        *((name, c_int32) for name in ("num_choices", "vocab", "stride", "max_top", "num_named")),
        *((name, c_void_p) for name in ("logits", "rows", "temperature", "top_k", "top_p", "log_min_p")),
        *((name, c_void_p) for name in ("uniform", "seeds", "positions", "num_top", "named", "given")),
        *((name, c_void_p) for name in ("tokens", "finite", "last_logit", "last_id", "scores")),
    )


PIECE_INTS = 4
"""Number of integers of `Piece` in C++: row_begin, row_end, first, table."""
MAX_LINES = 96
"""Maximum number of lines of a read; a line is one query head of one row."""
SPAN_INTS = 6
"""Number of integers of `Span` in C++: row_begin, row_end, piece_begin, piece_end, trunk_keys, trunk_table."""

BF16, FLOAT32 = 0, 1
SOFTMAX_OF_LOGITS, SIGMOID_OF_LOGITS = 0, 1
SILU, GELU_TANH, GELU, QUICK_GELU, RELU, RELU_SQUARED, RELU6, TANH, SIGMOID, IDENTITY = range(10)
LEAKY_RELU, MISH, LAPLACE, CLIPPED_GELU, HARD_SWISH = range(10, 15)
PANEL = 32
"""Number of columns of a packed panel. Every dimension of a model must be a multiple of it."""

FUNCTIONS = (
    ("motet_supported", c_int32, ()),
    ("motet_pack", None, (c_int32, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32)),
    ("motet_open", c_void_p, (POINTER(Model), c_int32)),
    ("motet_run", None, (c_void_p, POINTER(KernelBatch))),
    ("motet_multiply", None, (c_void_p, POINTER(PackedLinear), c_void_p, c_int32, c_void_p)),
    ("motet_read_memory", c_uint64, (c_void_p, c_void_p, c_uint64)),
    ("motet_multiply_tiles", c_double, (c_void_p, c_int32)),
    ("motet_close", None, (c_void_p,)),
    ("motet_open_sampler", c_void_p, (c_int32, c_int32)),
    ("motet_sample", None, (c_void_p, POINTER(SamplingArguments))),
    ("motet_close_sampler", None, (c_void_p,)),
)
"""Name, result and arguments of each function of the kernels."""

KINDS = ("avx512", "avx2")
"""Instruction sets for which kernels are compiled, the faster one first."""

FOLDER = Path(__file__).parent / "cpu"
"""Folder of the libraries."""
FAILURE_FILE = "not_compiled.txt"
"""Name of the file in `FOLDER` in which `setup.py` states why it could not compile the kernels."""


def library() -> ctypes.CDLL | None:
    """Returns the kernels, or None if none were built or this processor lacks instructions that they need."""
    return None if (kind := running_kind()) is None else of_kind(kind)


def running_kind() -> str | None:
    """Returns the one of `KINDS` that this machine runs; None if it runs none."""
    return next((kind for kind in KINDS if of_kind(kind) is not None), None)


def missing_kernels() -> str | None:
    """Returns None if this machine can run the compiled kernels. Otherwise returns one sentence for the user with the
    reason, the cost and, after a colon, the remedy if there is one. Loads neither torch nor a model.

    The kernels are optional, so neither pip nor the server fails without them, and pip hides what a build prints. The
    end of set-up, the start of a server, `/status` and `motet doctor` therefore show this sentence. It does not cover
    models that the kernels do not support (see `structure_for`)."""
    if library() is not None:
        return None
    if (reason := _unsupported_machine()) is not None:
        return f"{reason}, so torch's operators run instead, which are several times slower."
    return (
        f"The compiled kernels are missing ({_build_failure()}), so torch's operators run instead, which are several "
        f"times slower: install g++ 11 or newer (apt-get install g++) and then {_repeat_installation()}."
    )


def _unsupported_machine() -> str | None:
    """Returns the reason why the kernels can never run on this machine, or None if a compiler could build them."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        return f"Compiled kernels exist only for Linux on x86-64 and not for {system} on {machine}"
    sets = processor().instruction_sets
    if any(_path(kind) for kind in KINDS) or (sets and not {"avx2", "fma"} <= sets):
        return "This processor lacks AVX2, which the compiled kernels need"
    return None


def _build_failure() -> str:
    try:
        return (FOLDER / FAILURE_FILE).read_text().strip()
    except FileNotFoundError:
        return "Motet was installed without compiling them"


def _repeat_installation() -> str:
    """Returns what compiles the kernels. In a checkout, this module is in src/motet/engines/native."""
    in_checkout = (Path(__file__).parents[4] / "csrc").is_dir()
    return "run make setup" if in_checkout else "install Motet again from its source archive, or install its wheel"


def digest() -> str:
    """Returns a digest that identifies this build of the kernels, because another compiler can round in different
    places. Empty without kernels."""
    path = None if (kind := running_kind()) is None else _path(kind)
    return "" if path is None else blake2b(path.read_bytes(), digest_size=4).hexdigest()


def file_name(kind: str) -> str:
    """Returns the file name of the library of a kind. One file serves every Python version (see `setup.py`)."""
    return f"compiled_{kind}.abi3.so"


@cache
def of_kind(kind: str) -> ctypes.CDLL | None:
    """Returns the kernels for one of `KINDS`, or None if they were not built or this processor cannot run them."""
    if (path := _path(kind)) is None:
        return None
    kernels = _declared(ctypes.CDLL(str(path)))
    return kernels if kernels.motet_supported() else None


def _path(kind: str) -> Path | None:
    path = FOLDER / file_name(kind)
    return path if path.is_file() else None


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the types of the functions. Raises StartupError if the library was built with other structs."""
    sizes = (c_int32 * 8)()
    found.motet_sizes(sizes)
    structs = PackedLinear, Layer, Model, KernelBatch
    expected = [*map(ctypes.sizeof, structs), 4 * PIECE_INTS, 4 * SPAN_INTS]
    expected += map(ctypes.sizeof, (SamplingArguments, LowRankPart))
    if list(sizes) != expected:
        why = f"structs of {list(sizes)} bytes, not {expected}"
        raise StartupError(f"the compiled kernels were built from other sources ({why}): {_repeat_installation()}")
    for name, result, arguments in FUNCTIONS:
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found
