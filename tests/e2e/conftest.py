"""Servers that several modules share: a single engine, whose answers are the expected ones, and the default model.

They start when a test first requests them and run until the end, so tests must not change them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL, Smollm2
from motet.settings.server_config import cache_folder, environment
from tests.forked import ForkingProcess


@pytest.fixture(scope="session")
def one_engine(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, forking: ForkingProcess
) -> Iterator[Callable[[str], ChildServer]]:
    """A function that returns a server of one engine with the random model, in the given dtype."""
    environ = {**environment(), "TMPDIR": str(tmp_path_factory.mktemp("one"))}
    arguments = [
        str(folder), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1",
        "--max-num-batched-tokens", "64", "--max-num-seqs", "64",
    ]  # fmt: skip
    with ExitStack() as stack:

        @cache
        def serving(dtype: str) -> ChildServer:
            return stack.enter_context(forking.server([*arguments, "--dtype", dtype], environ=environ))

        yield serving


@pytest.fixture(scope="session")
def default_weights() -> None:
    """Skips tests that need the default model's weights if they are missing."""
    if not Smollm2(cache_folder(environment())).folder.is_dir():
        pytest.skip("the default model is not installed: motet models pull")


@pytest.fixture(scope="session")
def default_server(default_weights: None, forking: ForkingProcess) -> Iterator[ChildServer]:
    """A server with the default model."""
    with forking.server([DEFAULT_MODEL, "--kv-cache-gb", "0.5"]) as running:
        yield running
