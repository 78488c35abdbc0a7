"""A real server on a free loopback port, with a scripted engine."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from motet.text.tokenizer import Tokenizer
from tests.api.calling import TEMPLATE, CallingServing
from tests.api.noted_control import NotedControl
from tests.api.serving import Served, Serving
from tests.api.text_models import TextServing
from tests.api.two_models import Tokenizers, TwoModels, turned_tokenizer
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def tokenizer_without_template(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.load(save_tiny_tokenizer(folder, chat_template=None))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The tests of a module run in one loop, since they share a server."""
    return "asyncio"


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Serving]:
    """Starts servers. After the test each must be empty: no group is open, no slot is taken."""
    async with AsyncExitStack() as stack:
        yield Serving(tokenizer, stack)


@pytest.fixture
async def serve_texts(serve: Serving) -> AsyncIterator[TextServing]:
    async with AsyncExitStack() as stack:
        yield TextServing(serve, stack)


@pytest.fixture
async def served(serve: Serving) -> Served:
    """A server that answers `hello <index of the choice>`."""
    return await serve()


@pytest.fixture(scope="module")
async def refusing_server(tokenizer: Tokenizer) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        yield await Serving(tokenizer, stack)()


@pytest.fixture
def refusing(refusing_server: Served) -> Iterator[Served]:
    """A server that the tests of a module share. A refused request must leave no trace in it."""
    yield refusing_server
    assert refusing_server.engine.requests == []
    refusing_server.check()


@pytest.fixture(scope="session")
def calling_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tiny_tokenizer(tmp_path_factory.mktemp("calling"), chat_template=TEMPLATE))


@pytest.fixture
def serve_tools(serve: Serving, calling_tokenizer: Tokenizer) -> CallingServing:
    return CallingServing(serve, calling_tokenizer)


@pytest.fixture(scope="session")
def tokenizers(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    return tokenizer, turned_tokenizer(tmp_path_factory.mktemp("turned"))


@pytest.fixture
def models(tokenizers: Tokenizers) -> TwoModels:
    return TwoModels(tokenizers)


@pytest.fixture
def control() -> NotedControl:
    return NotedControl()


@pytest.fixture
async def trained(serve: Serving, control: NotedControl) -> Served:
    """A server with the routes for trainers."""
    served = await serve(rl=True)
    served.service.control = control
    return served
