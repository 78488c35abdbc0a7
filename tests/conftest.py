"""Fixtures for every test, and hooks that make test runs faster."""

import atexit
import gc
import logging
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.property_settings import register_profiles

if TYPE_CHECKING:
    from tests.forked import ForkingProcess

register_profiles()

pytest_plugins = ["tests.excluded", "tests.processes", "tests.strict", "tests.thinned"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freezes the imported objects, since they stay: the garbage collector need not visit them, now or between
    tests. It also runs less often for the garbage of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets the process exit without freeing the imported modules, as `tests.forked.leave` does. This saves 1 to 2 s.
    Functions that are registered later run before."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(session.exitstatus)

    atexit.register(leave)


def pytest_sessionfinish() -> None:
    """Collects the garbage of tests once, before pytest collects twice."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Makes torch's 60 loggers propagate: pytest adds its handlers to each that does not, three times a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restores Motet's logger after a command has changed it. Otherwise later tests would see other log lines."""
    logger = logging.getLogger("motet")
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    if logger.level != level:
        logger.setLevel(level)  # an assignment would leave the levels that other loggers have cached


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `kernels` where no kernels can be built, and fails them where kernels could be built but
    are missing. Skips tests marked `curl` where curl is missing."""
    if item.get_closest_marker("curl") and not shutil.which("curl"):
        pytest.skip("curl is not installed")
    if item.get_closest_marker("kernels"):
        from tests.kernels import best_kernels

        best_kernels()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with a tokenizer."""
    from tests.tiny_models import save_tiny_model
    from tests.tiny_tokenizer import save_tiny_tokenizer

    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def long_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `folder` for texts of 16,384 tokens, so that an answer cannot end before the test ends it."""
    long = shutil.copytree(folder, tmp_path_factory.mktemp("long") / "llama")
    config = (long / "config.json").read_text()
    assert '"max_position_embeddings": 1024' in config
    (long / "config.json").write_text(
        config.replace('"max_position_embeddings": 1024', '"max_position_embeddings": 16384')
    )
    return long


@pytest.fixture(scope="session")
def forking() -> Iterator["ForkingProcess"]:
    """A process that forks engines (`spawn=forking.spawn`) and servers (`forking.server` instead of `ChildServer`)."""
    from tests.forked import ForkingProcess  # needs pyzmq, which a machine lent for its GPU may lack

    with ForkingProcess() as process:
        yield process


@pytest.fixture
def all_forked(forking: "ForkingProcess", monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks all engines and servers that a program in this process starts, unless the program itself chooses how to
    start them."""
    for defaults, name, replacement in forking.replaced_defaults:
        monkeypatch.setitem(defaults, name, replacement)
