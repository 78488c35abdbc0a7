"""Converts a GGUF file, or a folder with weights in Python's pickle format, to a model folder with safetensors, the
tokenizer and its chat template. The weights of a GGUF file become bfloat16.

It is a separate program, because it is the only part of `motet.models` that needs torch, and so that its memory is
freed when it ends: python -m motet.models.convert FILE.gguf|FOLDER NEW_FOLDER

With `--only-metadata`, it writes the config and the tokenizer of a GGUF file, and no weights.
"""

import functools
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from motet.models.gguf_files.gguf_header import read_gguf

ONLY_METADATA = "--only-metadata"

REPEATED = ("GGUFReader", "get_tensor_name_map")
"""Functions that transformers calls again with the same arguments, for each part of the model or for each tensor. This
takes half of its time."""


def main(source: Path, folder: Path) -> None:
    """Writes a complete model folder."""
    if source.is_dir():
        convert_folder(source, folder)
    else:
        convert_gguf(source, folder)


def convert_folder(source: Path, folder: Path) -> None:
    """torch reads the files with `weights_only`, so that no code in them runs."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True, trust_remote_code=False)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False).save_pretrained(folder)


def convert_gguf(file: Path, folder: Path) -> None:
    _keep_repeated()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Without `dequantize` the weights stay packed in blocks of 4 bits, which `save_pretrained` cannot write.
    unpacked = GgufConfig(gguf_file=file.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _keep_repeated() -> None:
    for name in REPEATED:
        setattr(gguf, name, functools.cache(getattr(gguf, name)))


def convert_metadata(file: Path, folder: Path) -> None:
    """Writes config and tokenizer. `file` was checked with `gguf_files.gguf_folder.check_metadata`."""
    _keep_repeated()
    metadata, tensors = (header := read_gguf(file)).metadata, header.tensors.values()
    config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    if isinstance(head_dim := metadata.get(f"{metadata['general.architecture']}.attention.key_length"), int):
        config.head_dim = head_dim
    config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))  # the file has 1e-6 as a float32
    kinds = {entry.dtype for entry in tensors if len(entry.shape) > 1}
    config.dtype = torch.float16 if kinds == {"F16"} else torch.float32 if kinds == {"F32"} else torch.bfloat16
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    convert = convert_metadata if ONLY_METADATA in sys.argv else main
    convert(*(Path(argument) for argument in sys.argv[1:] if argument != ONLY_METADATA))
