"""Servers of tests/api, for hostile clients."""

from tests.api.conftest import anyio_backend, serve, served, tokenizer

__all__ = ["anyio_backend", "serve", "served", "tokenizer"]
