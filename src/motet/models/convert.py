"""Converts a GGUF file, or a folder with weights in Python's pickle format, to a model folder with safetensors, the
tokenizer and its chat template. The weights of a GGUF file become bfloat16.

It is a separate program, because it is the only part of `motet.models` that needs torch, and so that its memory is
freed when it ends: python -m motet.models.convert FILE.gguf|FOLDER NEW_FOLDER
"""

import functools
import sys
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

REPEATED = ("GGUFReader", "get_tensor_name_map")
"""Functions that transformers calls again with the same arguments, for each part of the model or for each tensor. This
takes half of its time."""


def main(source: Path, folder: Path) -> None:
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
    for name in REPEATED:
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Without `dequantize` the weights stay packed in blocks of 4 bits, which `save_pretrained` cannot write.
    unpacked = GgufConfig(gguf_file=file.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
