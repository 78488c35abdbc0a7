"""Starts vLLM from the virtual environment that `VLLM_VENV` names. Without it these tests are skipped."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from motet.models.smollm2 import Smollm2
from motet.settings.server_config import cache_folder, environment
from tests.real.vllm_servers import SCALE_OUT, RealVLLM, real_vllm

VENV = "VLLM_VENV"


@pytest.fixture(scope="session")
def vllm_folder() -> Path:
    named = environment().get(VENV)
    if not named:
        pytest.skip(f"{VENV} names no virtual environment with vLLM")
    return Path(named)


@pytest.fixture(scope="session")
def weights() -> Path:
    default = Smollm2(cache_folder(environment()))
    if not default.folder.is_dir():
        pytest.skip("the default model is not installed: motet models pull")
    return default.folder


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, weights: Path) -> Iterator[tuple[RealVLLM, RealVLLM]]:
    """Two servers: the first gets requests at `/v1/completions`, the second at `/inference/v1/generate`."""
    with ExitStack() as stack:
        plain = stack.enter_context(real_vllm(vllm_folder, weights, 0))
        scale_out = stack.enter_context(real_vllm(vllm_folder, weights, 1, SCALE_OUT))
        for one in (plain, scale_out):
            one.server.wait_until_ready()
        yield plain, scale_out
