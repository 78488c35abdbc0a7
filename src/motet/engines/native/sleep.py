"""An engine that sleeps: it is held, and gives its memory back to the system, for a trainer on the same machine.

    level 1   the KV cache. Groups that were kept wait, and compute their KV anew after that
    level 2   the weights too. New ones must be applied before the next step: those of the start, or a trainer's

Addresses stay, so nothing in the engine need be built again. But whoever reads KV over the network may have pinned its
pages: they are withdrawn from the transfers before they are given back, and offered again when the engine wakes.
"""

import logging

from motet.engines.native.core import EngineCore
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.memory import trim_heap
from motet.engines.native.weights import Renewal

logger = logging.getLogger(__name__)


class Sleeper:
    """Puts one engine to sleep and wakes it. Owned by the engine loop; may be called twice for the same."""

    def __init__(self, core: EngineCore, *, storage: KVStorage, renewal: Renewal) -> None:
        self._core = core
        self._storage = storage
        self._renewal = renewal
        self._withdrawn = False

    def sleep(self, *, weights: bool) -> None:
        """Gives back the KV cache, and with `weights` these too. The engine must be held."""
        self._core.forget_kv()
        if self._withdraw():
            self._storage.release_pages()
        else:
            logger.warning("a worker that hangs may still write into the KV cache, so its memory stays")
        if weights:
            self._renewal.forget()
        trim_heap()

    def wake(self) -> None:
        """Takes the KV cache again. Weights that were given back are brought as new ones are."""
        if self._withdrawn and self._core.transfers is not None:
            self._core.transfers.offer()
        self._withdrawn = False

    def _withdraw(self) -> bool:
        """Returns True if no transfer writes into the KV cache, nor can begin."""
        if not self._withdrawn:
            self._withdrawn = self._core.transfers is None or self._core.transfers.withdraw()
        return self._withdrawn
