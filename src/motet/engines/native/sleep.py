"""An engine that sleeps: it computes nothing and releases memory to the system, for a trainer on the same machine.

    level 1   the KV cache. Kept groups wait, and recompute their KV afterwards
    level 2   the weights too. The initial weights, or a trainer's, must be applied before the next step

Addresses do not change, so nothing in the engine must be built again. Network cards that read KV can have pinned its
pages, so the pages are deregistered from the transfers before they are released, and registered again when the engine
wakes.
"""

import logging

from motet.engines.native.core import EngineCore
from motet.engines.native.cpu.memory import trim_heap
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.weight_loader import WeightLoader

logger = logging.getLogger(__name__)


class Sleeper:
    """Puts one engine to sleep and wakes it. Owned by the engine loop. Each method can be called twice in a row."""

    def __init__(self, core: EngineCore, *, storage: KVStorage, weights: WeightLoader) -> None:
        self._core = core
        self._storage = storage
        self._weights = weights
        self._withdrawn = False

    def sleep(self, *, weights: bool) -> None:
        """Releases the KV cache; with `weights`, the weights too. The engine must be held (`EngineCore.held`)."""
        self._core.forget_kv()
        if self._withdraw():
            self._storage.release_pages()
        else:
            logger.warning("the KV cache is not released: a transfer by a hanging worker could still write into it")
        if weights:
            self._weights.release_pages()
        trim_heap()

    def wake(self) -> None:
        """Uses the KV cache again. Released weights must be applied like an update."""
        if self._withdrawn and self._core.transfers is not None:
            self._core.transfers.register_memory()
        self._withdrawn = False

    def _withdraw(self) -> bool:
        """Returns True if no transfer can write into the KV cache any more."""
        if not self._withdrawn:
            self._withdrawn = self._core.transfers is None or self._core.transfers.deregister_memory()
        return self._withdrawn
