"""A model folder for servers that need no weights, and a reset of logging after each command."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restores the process's logging after a command has changed it. Later tests would see no log lines otherwise."""
    logger = logging.getLogger("motet")
    before = (logger.handlers, logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before
