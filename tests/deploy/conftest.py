"""Fixtures with which the servers of this folder's tests start."""

from pathlib import Path

import pytest

from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model folder without weights."""
    return save_tiny_tokenizer(tmp_path_factory.mktemp("model"))
