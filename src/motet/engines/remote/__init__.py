"""Other servers as engines, over HTTP."""

from motet.engines.remote.calls import engine_client
from motet.engines.remote.engine import RemoteEngine
from motet.engines.remote.prefill import RemotePrefill, prefill_client
from motet.engines.remote.server import EngineServer

__all__ = ["EngineServer", "RemoteEngine", "RemotePrefill", "engine_client", "prefill_client"]
