"""Fixtures every test may use."""

import pytest
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)  # an example may wait for a core longer than it runs
settings.load_profile("shared machine")

pytest_plugins = ["tests.strict"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
