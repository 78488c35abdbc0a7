"""Workers that are servers: Motet's API over a scripted engine, on real sockets."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from motet.text.tokenizer import Tokenizer
from tests.api.serving import Served, Serving
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Serving]:
    """Starts servers, and checks at the end that each of them is empty."""
    async with AsyncExitStack() as stack:
        yield Serving(tokenizer, stack)


@pytest.fixture
async def served(serve: Serving) -> Served:
    return await serve()
