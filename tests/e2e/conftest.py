"""Servers that several modules ask: one engine by itself, which says what others must, and the default model.

They are started when first asked for and kept until the end, so tests leave them as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from motet.config import cache_folder, environment
from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL, Smollm2
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer, small enough to be served by real processes in a test."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return save_tiny_tokenizer(folder)


@pytest.fixture(scope="session")
def one_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ChildServer]]:
    """The random model's server in a dtype."""
    environ = {**environment(), "TMPDIR": str(tmp_path_factory.mktemp("one"))}
    arguments = [
        str(model), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1",
        "--max-num-batched-tokens", "64", "--max-num-seqs", "64",
    ]  # fmt: skip
    with ExitStack() as stack:

        @cache
        def serving(dtype: str) -> ChildServer:
            return stack.enter_context(ChildServer([*arguments, "--dtype", dtype], environ=environ))

        yield serving


@pytest.fixture(scope="session")
def default_weights() -> None:
    """Tests that need them are skipped where they are not."""
    if not Smollm2(cache_folder(environment()), say=lambda _: None).is_there:
        pytest.skip("the default model is not here: motet models pull")


@pytest.fixture(scope="session")
def default_server(default_weights: None) -> Iterator[ChildServer]:
    """Serves the default model."""
    with ChildServer([DEFAULT_MODEL, "--kv-cache-gb", "0.5"]) as running:
        yield running
