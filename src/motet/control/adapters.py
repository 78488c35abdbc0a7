"""Loads and unloads LoRA adapters on all engines of a server, or on all workers of a gateway. Every engine of a base
model has the same adapters, and a change is made on all of them or on none.

    load      every engine loads the adapter while it serves. If an engine cannot, the others go back to what they had
    unload    every engine removes it
    sync      an engine that is restarted, or a worker that joins, gets the adapters before it gets groups

Motet's engines take orders (`LoadAdapter`, `UnloadAdapter`); a vLLM server has routes (`AdapterEngine`), and reads an
adapter from its own disk or from a hub. An engine that does not answer during a change gets it when it returns."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from motet.control.controlled_engines import ControlledEngines
from motet.engine import ANSWERING, AdapterEngine, ControlledEngine, Engine, WorkerState
from motet.engine_info import EngineKind, ModelCard, adapter_in
from motet.engine_orders import (
    ADAPTER_EXISTS,
    ADAPTER_NOT_FOUND,
    INVALID_ADAPTER,
    TOO_MANY_ADAPTERS,
    LoadAdapter,
    UnloadAdapter,
)
from motet.engines.server_engine import ServerEngine
from motet.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    ModelNotFoundError,
    MotetError,
    NotFoundError,
    NoWorkerError,
    RequestError,
)
from motet.ids import ModelName
from motet.models.adapter_file import CONFIG_FILE
from motet.models.checkpoint import CheckpointKind
from motet.models.memory_file import MemoryFile
from motet.routing.router import Router
from motet.routing.workers.member import Member

logger = logging.getLogger(__name__)

LISTED_TIMEOUT_S = 5.0
"""Maximum time in seconds until the reports of vLLM workers, one each second, show a change."""
POLL_S = 0.05
MAX_RECORDED = 1024
"""Maximum number of adapters that a server records, loaded and unloaded."""
NO_ADAPTERS = "This server has no engines that can load adapters: start Motet's servers with --max-adapters above 0."


@dataclass(frozen=True, eq=False)
class AdapterSource:
    """Where engines read an adapter: a folder in PEFT's layout, or a safetensors file in memory."""

    path: Path
    memory: MemoryFile | None = None
    """The file in memory; None for a folder."""
    config: str = ""
    """Content of `adapter_config.json` for a file in memory; empty for a folder."""

    @property
    def root(self) -> str:
        return "" if self.memory is not None else str(self.path)

    def order(self, name: ModelName, *, version: str, in_place: bool) -> LoadAdapter:
        kind = CheckpointKind.FILES if self.memory is None else CheckpointKind.MEMORY
        path, config = str(self.path), self.config
        return LoadAdapter(name, kind, path, config=config, root=self.root, version=version, in_place=in_place)

    def check_folder(self, name: str) -> None:
        """Raises NotFoundError if the source is a folder of this machine that has no adapter."""
        if self.memory is None and not (self.path / CONFIG_FILE).is_file():
            path = f"{self.path}: it must be a folder with {CONFIG_FILE}, on the machine of the engines"
            message = f"Loading lora {name} failed: No adapter found for {path}"
            raise NotFoundError(message, param="lora_path", code=ADAPTER_NOT_FOUND)

    def settle(self) -> None:
        """Called when the engines have read the adapter."""
        if self.memory is not None:
            self.memory.settle()

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that the engines of a base model have loaded through this server."""

    base: ModelName
    source: AdapterSource
    version: str
    digest: str
    """Digest that Motet's engines report; empty if only vLLM servers have loaded it."""


@dataclass(frozen=True)
class _AdapterWorker:
    id: str
    engine: Engine
    card: ModelCard | None
    """The adapter as the worker lists it before a change; None if the worker does not have it."""

    @property
    def base(self) -> ModelName:
        return self.engine.info.model


Call = Callable[[_AdapterWorker], Awaitable[None]]


class AdapterControl:
    """Loads and unloads adapters, one change at a time. Owned by `EngineControl`."""

    def __init__(self, router: Router, engines: ControlledEngines, *, on_other_servers: bool) -> None:
        """`on_other_servers`: True if engines on other servers load adapters too."""
        self._router = router
        self._fleet = router.fleet
        self._lock = engines.lock
        self._on_other_servers = on_other_servers
        self.fixed = ""
        """Reason why clients cannot change the adapters of this server at run time; empty if they can."""
        self._recorded: dict[ModelName, LoadedAdapter | None] = {}
        """The adapters that were loaded through this server; None for those that were unloaded."""
        self._count = 0
        """Number of adapters that were loaded so far."""

    async def load(
        self, name: str, source: AdapterSource, *, base: str | None = None, in_place: bool, version: str | None = None
    ) -> str:
        """Loads an adapter, and owns its source from now on. Returns its version once it can be requested. `base`: its
        base model, required if the workers have several. `in_place`: True to replace an adapter with this name.
        `version`: by default the number of loaded adapters so far. Raises MotetError; then no engine has changed."""
        return await asyncio.shield(self._load(ModelName(name), source, base=base, in_place=in_place, version=version))

    async def unload(self, name: str) -> None:
        """Removes an adapter from all engines that have it. Raises ModelNotFoundError if none has it, or the error of
        an engine that cannot remove it."""
        await asyncio.shield(self._unload(ModelName(name)))

    async def sync(self, engine: Engine, listed: Sequence[ModelCard]) -> None:
        """Gives an engine that joins the adapters of the others. The caller holds the lock. `listed`: models that the
        worker lists in addition to the facts of its engine. An adapter that it cannot load is logged; the other engines
        serve it. Raises EngineDiedError or EngineClosedError."""
        if not _loads_adapters(engine):
            return
        cards = {card.name: card for card in listed}
        for name, loaded in self._recorded.items():
            worker = _AdapterWorker(str(engine.info.model), engine, cards.get(name) or _card_in(engine, name))
            try:
                if loaded is None and worker.card is not None:
                    await _unload(worker, name)
                elif loaded is not None and loaded.base == worker.base and not _has(worker, loaded, name=name):
                    await _load(worker, loaded.source.order(name, version=loaded.version, in_place=True))
                    await self._check_digest(worker, loaded, name=name)
            except (EngineDiedError, EngineClosedError):
                raise
            except MotetError as error:
                logger.error("a worker joins without the adapter %s: %s", name, error.message)

    def close(self) -> None:
        for loaded in self._recorded.values():
            if loaded is not None:
                loaded.source.close()
        self._recorded.clear()

    async def _load(
        self, name: ModelName, source: AdapterSource, *, base: str | None, in_place: bool, version: str | None
    ) -> str:
        try:
            async with self._lock:
                workers = self._workers_of(base, name)
                if not self._on_other_servers:
                    source.check_folder(name)
                self._check_name(name, workers, in_place=in_place)
                self._count += 1
                order = source.order(name, version=version or str(self._count), in_place=in_place)
                changed = workers if in_place else [worker for worker in workers if worker.card is None]
                before = {worker.id: adapter_in(worker.engine.info, name) for worker in changed}
                digest = await self._load_each(changed, order, of=workers)
                self._record(name, LoadedAdapter(workers[0].base, source, order.version, digest))
        except BaseException:
            source.close()
            raise
        source.settle()
        infos = [worker.engine.info for worker in changed]
        new = next((adapter for info in infos if (adapter := adapter_in(info, name)) is not None), None)
        for old in {old for old in before.values() if old is not None and old.digest != digest}:
            if new is not None:
                self._fleet.successors.replace_adapter(old, new, infos=infos)
        self._fleet.refresh_facts()
        await self._until_listed(name, [worker.id for worker in changed], listed=True)
        logger.info("adapter %s, version %s, is loaded; number of engines: %d", name, order.version, len(changed))
        return order.version

    async def _load_each(
        self, workers: Sequence[_AdapterWorker], order: LoadAdapter, *, of: Sequence[_AdapterWorker]
    ) -> str:
        """Makes all workers load the adapter, or none. `of`: all workers of the base
        model, which have the adapter afterwards. Returns its digest; empty if no worker reports one."""
        loaded, error = await self._each(workers, lambda worker: _load(worker, order))
        kept = [worker for worker in of if worker not in workers]
        found = (adapter_in(worker.engine.info, order.name) for worker in (*loaded, *kept))
        digests = {adapter.digest for adapter in found if adapter is not None}
        if error is None and len(digests) > 1:
            error = EngineError(f"the engines have read different adapters in {order.path}")
        if error is not None:
            await asyncio.gather(*(self._restore(worker, order) for worker in loaded))
            self._fleet.refresh_facts()
            raise error
        return digests.pop() if digests else ""

    async def _restore(self, worker: _AdapterWorker, order: LoadAdapter) -> None:
        """Gives a worker the adapter that it had before `order`, or removes the new one. Never raises MotetError."""
        card, previous = worker.card, self._recorded.get(order.name)
        source = None if previous is None else previous.source
        if source is None and card is not None and card.root:
            source = AdapterSource(Path(card.root))
        try:
            if card is not None and source is not None:
                version = previous.version if previous is not None else order.version
                await _load(worker, source.order(order.name, version=version, in_place=True))
            else:
                await _unload(worker, order.name)
        except MotetError as error:
            logger.error("%s cannot go back to its previous adapter %s: %s", worker.id, order.name, error.message)

    async def _unload(self, name: ModelName) -> None:
        async with self._lock:
            workers = [worker for worker in self._workers(name) if worker.card is not None]
            if not workers:
                raise ModelNotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
            _, error = await self._each(workers, lambda worker: _unload(worker, name))
            self._fleet.refresh_facts()
            if error is not None:
                raise error
            self._record(name, None)
        await self._until_listed(name, [worker.id for worker in workers], listed=False)
        logger.info("adapter %s is unloaded", name)

    def _record(self, name: ModelName, loaded: LoadedAdapter | None) -> None:
        previous = self._recorded.pop(name, None)
        if previous is not None:
            previous.source.close()
        self._recorded[name] = loaded
        unloaded = [other for other, adapter in self._recorded.items() if adapter is None]
        for other in unloaded[: max(0, len(self._recorded) - MAX_RECORDED)]:
            del self._recorded[other]

    def _check_name(self, name: ModelName, workers: Sequence[_AdapterWorker], *, in_place: bool) -> None:
        base = workers[0].base
        known = self._fleet.catalog.models().get(name)
        if known is not None and known.parent != base:
            raise RequestError(f"{name!r} is the name of another model.", param="lora_name", code="invalid_value")
        if all(worker.card is not None for worker in workers) and not in_place:
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            raise RequestError(message, param="lora_name", code=ADAPTER_EXISTS)
        if name not in self._recorded and sum(one is not None for one in self._recorded.values()) >= MAX_RECORDED:
            raise RequestError(f"{MAX_RECORDED} adapters are loaded, which is the limit.", code=TOO_MANY_ADAPTERS)

    def _workers(self, name: ModelName) -> list[_AdapterWorker]:
        """Returns the workers that answer and can load adapters."""
        members = [member for member in self._members() if member.state in ANSWERING]
        return [
            _AdapterWorker(member.id, member.worker.engine, member.models.by_name.get(name))
            for member in members
            if member.worker is not None and _loads_adapters(member.worker.engine)
        ]

    def _members(self) -> list[Member]:
        members = self._fleet.members
        return [one for one in members if self._on_other_servers or one.worker is None or one.worker.local]

    def _workers_of(self, base: str | None, name: ModelName) -> list[_AdapterWorker]:
        """Returns the workers of a base model; None for the only one. Raises MotetError."""
        workers = self._workers(name)
        if not workers:
            if any(self._may_load(member) for member in self._members()):
                raise NoWorkerError("No worker that can load adapters answers at this moment.")
            raise NotFoundError(NO_ADAPTERS, code="no_adapters")
        bases = sorted({worker.base for worker in workers})
        if base is None and len(bases) > 1:
            message = f"The workers have several models ({', '.join(bases)}): name one in 'base_model_name'."
            raise RequestError(message, param="base_model_name", code="missing_required_parameter")
        found = [worker for worker in workers if base in (None, worker.base)]
        if not found:
            message = f"No worker that can load adapters has the model {base!r}. Their models: {', '.join(bases)}."
            raise ModelNotFoundError(message, param="base_model_name")
        return found

    def _may_load(self, member: Member) -> bool:
        """Returns True if the worker could load adapters when it answers."""
        if member.worker is None:
            return member.facts.kind in (None, EngineKind.VLLM)
        return _loads_adapters(member.worker.engine)

    async def _each(
        self, workers: Sequence[_AdapterWorker], call: Call
    ) -> tuple[list[_AdapterWorker], MotetError | None]:
        """Calls all workers at the same time. Returns the workers that succeeded, and the first error, which names its
        worker. A worker that dies is not an error if another succeeds: it gets the change when it returns, like the
        workers that do not answer now."""
        answers = await asyncio.gather(*(call(worker) for worker in workers), return_exceptions=True)
        succeeded: list[_AdapterWorker] = []
        died: list[MotetError] = []
        failed: list[MotetError] = []
        for worker, answer in zip(workers, answers, strict=True):
            if answer is None:
                succeeded.append(worker)
            elif isinstance(answer, EngineDiedError | EngineClosedError):
                died.append(EngineError(f"{worker.id}: {answer.message}"))
                _force_rejoin(worker.engine)
            elif isinstance(answer, MotetError):
                failed.append(_named(answer, worker.id))
            else:
                raise answer
        for member in self._members():
            if member.worker is not None and member.state not in (*ANSWERING, WorkerState.STARTING):
                _force_rejoin(member.worker.engine)
        return succeeded, next(iter(failed if failed or succeeded else died), None)

    async def _check_digest(self, worker: _AdapterWorker, loaded: LoadedAdapter, *, name: ModelName) -> None:
        """Removes an adapter from a worker that has read another one than the other engines."""
        adapter = adapter_in(worker.engine.info, name)
        if adapter is None or not loaded.digest or adapter.digest == loaded.digest:
            return
        await _unload(worker, name)
        raise EngineError(f"{loaded.source.path} no longer contains version {loaded.version} of the adapter")

    async def _until_listed(self, name: ModelName, ids: Sequence[str], *, listed: bool) -> None:
        """Waits until the reports of vLLM workers show the change. A worker that is lost is not waited for."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + LISTED_TIMEOUT_S
        while any(worker.id in ids and (worker.card is not None) != listed for worker in self._workers(name)):
            if loop.time() > deadline_s:
                raise NoWorkerError(f"The workers did not report the change of {name!r} in {LISTED_TIMEOUT_S:g} s.")
            await asyncio.sleep(POLL_S)


def _loads_adapters(engine: Engine) -> bool:
    return isinstance(engine, AdapterEngine) or (isinstance(engine, ControlledEngine) and engine.info.max_adapters > 0)


async def _load(worker: _AdapterWorker, order: LoadAdapter) -> None:
    engine = worker.engine
    if isinstance(engine, ControlledEngine):
        await engine.send(order)
    elif order.kind is not CheckpointKind.FILES:
        raise RequestError("a vLLM server loads adapters from folders only", code=INVALID_ADAPTER)
    elif isinstance(engine, AdapterEngine):
        await engine.load_adapter(order.name, order.path, in_place=order.in_place)


async def _unload(worker: _AdapterWorker, name: ModelName) -> None:
    engine = worker.engine
    if isinstance(engine, ControlledEngine):
        await engine.send(UnloadAdapter(name))
    elif isinstance(engine, AdapterEngine):
        await engine.unload_adapter(name)


def _card_in(engine: Engine, name: ModelName) -> ModelCard | None:
    """Returns the adapter as an engine reports it; None if it does not have it."""
    info, adapter = engine.info, adapter_in(engine.info, name)
    if adapter is None:
        return None
    return ModelCard(name=name, root=adapter.root, parent=info.model, max_model_len=info.max_model_len)


def _has(worker: _AdapterWorker, loaded: LoadedAdapter, *, name: ModelName) -> bool:
    """Returns True if a worker that joins has this adapter already."""
    adapter = adapter_in(worker.engine.info, name)
    if adapter is not None:
        return (adapter.digest, adapter.version) == (loaded.digest, loaded.version)
    return worker.card is not None and worker.card.root == loaded.source.root


def _force_rejoin(engine: Engine) -> None:
    """Makes a worker on another server join again, which gives it the adapters."""
    if isinstance(engine, ServerEngine):
        engine.force_rejoin(EngineDiedError("it did not receive a change of its adapters"))


def _named(error: MotetError, worker: str) -> MotetError:
    """Returns the error with the worker's id in its message, and the field of the request."""
    message = f"{worker}: {error.message}"
    if not isinstance(error, RequestError):
        return EngineError(message)
    param = "lora_path" if error.code in (INVALID_ADAPTER, ADAPTER_NOT_FOUND) else error.param
    kind = NotFoundError if isinstance(error, NotFoundError) else RequestError
    return kind(message, param=param, code=error.code)
