from pathlib import Path

import pytest

from tests.api.batches.batch_serving import BatchServing
from tests.api.serving import Serving


@pytest.fixture
def serve_batches(serve: Serving, tmp_path: Path) -> BatchServing:
    return BatchServing(serve, tmp_path / "batches")
