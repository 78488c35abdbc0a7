"""The servers of the API's tests, as hostile callers meet them."""

from tests.api.conftest import anyio_backend, serve, served, tokenizer

__all__ = ["anyio_backend", "serve", "served", "tokenizer"]
