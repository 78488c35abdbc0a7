"""Servers that tests attack as hostile clients and as hostile workers."""

from pathlib import Path

import pytest

from tests.api.batches.conftest import serve_batches
from tests.api.conftest import anyio_backend, serve, served, tokenizer
from tests.tiny_tokenizer import save_tiny_tokenizer

__all__ = ["anyio_backend", "serve", "serve_batches", "served", "tokenizer"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return save_tiny_tokenizer(tmp_path_factory.mktemp("model"))
