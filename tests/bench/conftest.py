"""A server that generates the requested number of tokens."""

from collections.abc import Iterator

import pytest

from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import fake_answer, save_tiny_tokenizer


def talkative(_: GenerateRequest, __: ChoiceStart) -> list[int]:
    return fake_answer("and on ", eos=False)


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with FakeServer(save_tiny_tokenizer(tmp_path_factory.mktemp("model")), talkative) as server:
        yield server.url
