"""Fixtures every test may use."""

import pytest

pytest_plugins = ["tests.strict"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
