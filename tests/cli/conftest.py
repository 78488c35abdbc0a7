"""A model folder for servers that need no weights."""

from pathlib import Path

import pytest

from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(tmp_path_factory.mktemp("model"))
