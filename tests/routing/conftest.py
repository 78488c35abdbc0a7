"""Checks at the end of each routing test that it has left nothing behind."""

from collections.abc import Generator
from functools import wraps
from inspect import iscoroutinefunction

import pytest

from tests.routing.scene import CREATED_SCENES


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Checks every scene that the test made: nothing of it may be open, kept or running."""
    test = pyfuncitem.obj

    @wraps(test)
    async def checked(**arguments: object) -> None:
        CREATED_SCENES.clear()
        await test(**arguments)
        for scene in CREATED_SCENES:
            scene.check()

    if iscoroutinefunction(test):
        pyfuncitem.obj = checked
    return (yield)
