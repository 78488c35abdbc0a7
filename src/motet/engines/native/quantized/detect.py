"""Finds the format of a checkpoint in its `config.json`, or in its GGUF file."""

from collections.abc import Callable
from pathlib import Path

from motet.engines.native.quantized.awq import AwqFormat
from motet.engines.native.quantized.compressed import CompressedFormat
from motet.engines.native.quantized.fields import Fields
from motet.engines.native.quantized.fp8 import Fp8Format
from motet.engines.native.quantized.gguf_format import GgufFormat
from motet.engines.native.quantized.gptq import GptqFormat
from motet.engines.native.quantized.mxfp4 import Mxfp4Format
from motet.engines.native.quantized.stored_tensors import Format
from motet.models.folder import read_object, weight_files
from motet.models.gguf_files.gguf_header import SUFFIX

FORMATS: dict[str, Callable[[Fields], Format]] = {
    "gptq": GptqFormat.of,
    "awq": AwqFormat.of,
    "compressed-tensors": CompressedFormat.of,
    "fp8": Fp8Format.of,
    "mxfp4": Mxfp4Format.of,
}
"""The formats by their `quant_method`."""
CONFIG_FIELDS = ("quantization_config", "compression_config")
"""Names of the field. compressed-tensors used the second one until 2024."""


def format_of(folder: Path) -> Format | None:
    """Returns the format of the checkpoint in a folder; None if it is not quantized. Raises UnsupportedModelError,
    which names the field and its value, for a format or a parameter that is not supported."""
    file = folder / "config.json"
    if folder.is_file() or not file.exists():
        return None
    weights = next(weight_files(folder))
    if weights.suffix == SUFFIX:
        return GgufFormat.of(weights)
    config = Fields(read_object(file), str(file))
    for fields in (config, config.object("text_config")):
        for name in CONFIG_FIELDS:
            if fields.get(name) is not None:
                found = fields.object(name)
                method = found.text("quant_method", (*FORMATS,))
                return FORMATS[method](found)
    return None
