"""Writes GGUF files with the library that defines the format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Arrays = Mapping[str, np.ndarray[Any, Any]]


def write_gguf(
    file: Path,
    architecture: str,
    arrays: Arrays,
    *,
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, int | float] | None = None,
) -> Path:
    """Writes float32 arrays, in the types of `kinds`: `Q8_0`, and the types that the library cannot make, `Q4_K`, whose
    blocks are then the array's bytes. `metadata`: values by their names without the architecture."""
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (metadata or {}).items():
        full = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    for name, array in arrays.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        if array.dtype == np.uint8:
            writer.add_tensor(name, array, raw_dtype=kind)
        elif kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, array.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(array.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
