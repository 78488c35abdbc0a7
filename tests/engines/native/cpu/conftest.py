"""Tests marked `kernels` are skipped where there are none."""

import pytest

from motet.engines.native.cpu.library import library


@pytest.fixture(autouse=True)
def kernels_where_needed(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("kernels") and library() is None:
        pytest.skip("the compiled kernels were not built, or this processor cannot run them")
