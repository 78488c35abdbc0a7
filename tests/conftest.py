"""Fixtures every test may use."""

import atexit
import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.property_settings import register_profiles

if TYPE_CHECKING:
    from tests.forked import ForkingProcess

register_profiles()

pytest_plugins = ["tests.strict"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: the collector need not go through it again and again, now or between tests, and of what
    tests leave behind it need not look often for a few kilobytes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """A worker of xdist does not take apart what it imported when it ends, as `leave` of `tests.forked`: 2 s less."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)


def pytest_sessionfinish() -> None:
    """The collector looks once for what tests left behind, before pytest looks twice."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """pytest hangs its handlers on every logger that tells its parent nothing, three times a test; torch has 60."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `kernels` are skipped where none can be, and fail where they could be and are not."""
    if item.get_closest_marker("kernels"):
        from tests.kernels import best_kernels

        best_kernels()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, with a tokenizer."""
    from tests.tiny_models import save_tiny_model
    from tests.tiny_tokenizer import save_tiny_tokenizer

    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def forking() -> Iterator["ForkingProcess"]:
    """Where engines and servers come from: `spawn=forking.spawn`, and `forking.server` for a `ChildServer`."""
    from tests.forked import ForkingProcess  # wants pyzmq, which a machine lent for its GPU may lack

    with ForkingProcess() as process:
        yield process


@pytest.fixture
def all_forked(forking: "ForkingProcess", monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a program starts that is tried in this process is forked, unless it says itself where it comes from."""
    for defaults, name, ours in forking.instead:
        monkeypatch.setitem(defaults, name, ours)
