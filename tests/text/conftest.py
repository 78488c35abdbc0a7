"""The small tokenizers as Motet's own, for the tests of the text layer."""

import pytest

from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import build_byte_fallback_tokenizer, build_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level."""
    return Tokenizer(build_tiny_tokenizer())


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    """Sentencepiece-like, with byte fallback."""
    return Tokenizer(build_byte_fallback_tokenizer(), named_tokens={"bos_token": "<s>", "eos_token": "</s>"})
