"""Other servers as engines, over HTTP."""

from motet.engines.remote.prefill import RemotePrefill, prefill_client

__all__ = ["RemotePrefill", "prefill_client"]
