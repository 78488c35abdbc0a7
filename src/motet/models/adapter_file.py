"""A LoRA adapter as one safetensors file: its tensors by PEFT's names, and its `adapter_config.json` as a text in the
file's metadata. Trainers send adapters in this form, and PEFT's own form is a folder with two files."""

import json
from pathlib import Path

from motet.errors import ModelLoadError
from motet.models.regular_files import open_regular
from motet.models.safetensors_header import HEADER_LENGTH_BYTES, MAX_HEADER_BYTES

CONFIG_KEY = "adapter_config"
"""Key of the config in the metadata."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def config_in(file: Path) -> str:
    """Returns the config in a file that `check_safetensors` has checked. Raises ModelLoadError if it has none."""
    with open_regular(file) as opened:
        length = min(int.from_bytes(opened.read(HEADER_LENGTH_BYTES) or b"", "little"), MAX_HEADER_BYTES)
        header = json.loads(opened.read(length) or b"{}")
    config = header.get("__metadata__", {}).get(CONFIG_KEY)
    if not isinstance(config, str):
        raise ModelLoadError(f"it has no {CONFIG_KEY!r} in its metadata, the content of {CONFIG_FILE}")
    return config
