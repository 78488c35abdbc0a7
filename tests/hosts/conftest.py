"""A tiny model, and hosts to serve it on."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts.network import Host, NoNetwork, hosts
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, with a tokenizer."""
    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def network() -> Iterator[Mapping[str, Host]]:
    """Four hosts for servers and one for who asks them."""
    with ExitStack() as stack:
        try:
            joined = stack.enter_context(hosts("one", "two", "three", "four", "client"))
        except NoNetwork as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield joined
