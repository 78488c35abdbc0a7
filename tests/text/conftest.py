"""The small tokenizers of the tests, as Motet's own class, for the text layer."""

import pytest

from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import build_byte_fallback_tokenizer, build_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer."""
    return Tokenizer(build_tiny_tokenizer())


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    """A tokenizer like sentencepiece's, with byte fallback."""
    return Tokenizer(build_byte_fallback_tokenizer(), named_tokens={"bos_token": "<s>", "eos_token": "</s>"})
