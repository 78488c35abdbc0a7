"""Converts a GGUF file to a model folder: bfloat16 safetensors, tokenizer, chat template.

It is a separate program, because it is the only part of `motet.models` that needs torch, and so that its memory is
freed when it ends: python -m motet.models.convert FILE.gguf FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Without `dequantize` the weights stay packed in blocks of 4 bits, which `save_pretrained` cannot write.
    unpacked = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
