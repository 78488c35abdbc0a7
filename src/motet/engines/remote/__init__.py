"""Other servers as engines, over HTTP."""

from motet.engines.remote.engine import RemoteEngine
from motet.engines.remote.prefill import RemotePrefill, prefill_client
from motet.engines.remote.server import EngineServer

__all__ = ["EngineServer", "RemoteEngine", "RemotePrefill", "prefill_client"]
