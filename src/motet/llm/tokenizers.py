"""The tokenizer of a model, for programs that need it."""

from typing import Any

from motet.errors import ModelLoadError
from motet.models.model_source import local_folder
from motet.models.smollm2 import DEFAULT_MODEL, HUB_MODEL
from motet.settings.server_config import cache_folder, environment


def load_tokenizer(root: str) -> Any:
    """Returns transformers' tokenizer of a model. `root`: its folder, or its name on the Hugging Face Hub, from which
    the tokenizer is downloaded if it is not on this machine. Raises ModelLoadError."""
    from transformers import AutoTokenizer

    folder = local_folder(DEFAULT_MODEL if root == HUB_MODEL else root, cache=cache_folder(environment()))
    try:
        return AutoTokenizer.from_pretrained(folder or root)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the tokenizer of {root} cannot be loaded: {error}") from error
