"""An `LLM` with the tiny model, which the tests of a module share, and servers that start quickly."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from motet import LLM

if TYPE_CHECKING:
    from tests.forked import ForkingProcess

SMALL: dict[str, Any] = {
    "served_model_name": "tiny",
    "dtype": "float32",
    "kv_cache_gb": 0.05,
    "num_threads": 1,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def module_forked(forking: "ForkingProcess") -> Iterator[None]:
    """Forks the servers of all `LLM`s of a module, and their engines."""
    with pytest.MonkeyPatch.context() as patch:
        for defaults, name, replacement in forking.replaced_defaults:
            patch.setitem(defaults, name, replacement)
        yield


@pytest.fixture(scope="module")
def llm(folder: Path, module_forked: None) -> Iterator[LLM]:
    with LLM(str(folder), **SMALL) as running:
        yield running
