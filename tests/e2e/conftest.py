"""A random model with a tokenizer, small enough to be served by real processes in a test."""

from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return save_tiny_tokenizer(folder)
