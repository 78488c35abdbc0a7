"""Creates model folders with the minimum content that passes the checks."""

import json
from pathlib import Path


def write_safetensors(file: Path, *, data_bytes: int = 8, name: str = "w") -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data_bytes))


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder
