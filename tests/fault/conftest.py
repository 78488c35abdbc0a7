"""Tiny models for tests that break things."""

from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines started from now on move KV over TCP, as between machines: through shared memory a stopped process can
    still be read."""
    monkeypatch.setenv("UCX_TLS", "tcp")
