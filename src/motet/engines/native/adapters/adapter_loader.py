"""Executes orders to load adapters, in a thread, while the engine runs steps."""

import logging
import threading
import time
from collections.abc import Sequence

from motet.engine_info import AdapterInfo
from motet.engine_orders import LoadAdapter
from motet.engines.native.adapters.low_rank import AdapterMaker, ServedAdapter
from motet.engines.native.adapters.peft_files import read_adapter
from motet.errors import ConfigError, EngineError, MotetError, RequestError
from motet.ids import ModelName
from motet.models.checkpoint import CheckpointKind
from motet.settings.named_adapter import named_adapters
from motet.transfer.mailbox import Mailbox

logger = logging.getLogger(__name__)

Loaded = tuple[int, LoadAdapter, ServedAdapter | MotetError]
"""The number of an order, the order, and the adapter or the reason why it cannot be used."""


class AdapterLoader:
    """Reads adapters, and converts them for the engine's backend."""

    def __init__(self, maker: AdapterMaker | None, *, max_rank: int, served: Sequence[str]) -> None:
        """`maker`: None for a backend that cannot compute adapters. `served`: names and paths of the base model."""
        self._maker = maker
        self._max_rank = max_rank
        self._served = served

    def load(self, order: LoadAdapter) -> ServedAdapter:
        """Raises RequestError if the adapter cannot be used."""
        if self._maker is None:
            message = "these kernels cannot compute adapters: start the server with --kernels torch"
            raise RequestError(message, code="no_adapters")
        start_s = time.monotonic()
        tensors = read_adapter(order, self._maker, max_rank=self._max_rank, served=self._served)
        adapter = ServedAdapter(
            AdapterInfo(
                name=order.name, root=order.root, digest=tensors.digest, version=order.version, rank=tensors.rank
            ),
            self._maker.make(tensors.parts),
        )
        facts = tensors.rank, len(tensors.parts), time.monotonic() - start_s
        logger.info("adapter %s: rank %d, %d layers, read in %.2f s", order.name, *facts)
        return adapter

    def load_all(self, texts: Sequence[str], *, maximum: int) -> tuple[ServedAdapter, ...]:
        """Returns the adapters of `--adapter NAME=FOLDER`. Raises ConfigError if one cannot be used."""
        named = named_adapters(texts)
        if self._maker is not None and len(named) > maximum:
            raise ConfigError(f"--adapter is given {len(named)} times; the maximum is {maximum} (--max-adapters)")
        found = []
        for one in named:
            order = LoadAdapter(ModelName(one.name), CheckpointKind.FILES, one.path, root=one.path)
            try:
                found.append(self.load(order))
            except RequestError as error:
                raise ConfigError(f"--adapter {one.name}={one.path}: {error.message}") from error
        return tuple(found)


class AdapterThreads:
    """Reads adapters in threads, one at a time. Its methods are called by the engine loop only."""

    def __init__(self, loader: AdapterLoader) -> None:
        self._loader = loader
        self._one_at_a_time = threading.Lock()
        self._done = Mailbox[Loaded]()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `take` has something to return."""
        return self._done.fileno()

    def start(self, number: int, order: LoadAdapter) -> None:
        threading.Thread(target=self._work, args=(number, order), name="adapter", daemon=True).start()

    def take(self) -> list[Loaded]:
        return self._done.take()

    def close(self) -> None:
        self._done.close()

    def _work(self, number: int, order: LoadAdapter) -> None:
        with self._one_at_a_time:
            try:
                self._done.put((number, order, self._loader.load(order)))
            except MotetError as error:
                self._done.put((number, order, error))
            except Exception as error:  # such as MemoryError: the engine continues to serve
                logger.exception("the adapter %s cannot be loaded", order.name)
                self._done.put((number, order, EngineError(f"the adapter {order.name} cannot be loaded: {error!r}")))
