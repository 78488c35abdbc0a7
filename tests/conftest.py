"""Fixtures every test may use."""

import gc
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.property_settings import register_profiles

if TYPE_CHECKING:
    from tests.engines.native.forked import ForkingProcess

register_profiles()

pytest_plugins = ["tests.strict"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: the collector need not go through it again and again, now or between tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def kernels_where_needed(request: pytest.FixtureRequest) -> None:
    """Tests marked `kernels` are skipped where there are none."""
    if request.node.get_closest_marker("kernels") is None:
        return
    from motet.engines.native.cpu.library import library

    if library() is None:
        pytest.skip("the compiled kernels were not built, or this processor cannot run them")


@pytest.fixture(scope="session")
def forking() -> Iterator["ForkingProcess"]:
    """Where engines come from in tests that start many: `spawn=forking.spawn`."""
    from tests.engines.native.forked import ForkingProcess  # wants pyzmq, which a machine lent for its GPU may lack

    with ForkingProcess() as process:
        yield process
