"""Converts a GGUF file to a model folder: bfloat16 safetensors, tokenizer, chat template.

It is a separate program, because it is the only part of `motet.models` that needs torch, and so that its memory is
freed when it ends: python -m motet.models.convert FILE.gguf FOLDER
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


def main(file: Path, folder: Path) -> None:
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
