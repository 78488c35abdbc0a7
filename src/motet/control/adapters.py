"""LoRA adapters of the vLLM workers of a gateway: an adapter is loaded by all workers of its base model, or by none.

Motet's own engines have no adapters. A vLLM server that restarts has only the adapters of its command line, so the
operator loads the others again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from motet.engine import ANSWERING, AdapterEngine, WorkerReport
from motet.engine_info import EngineKind
from motet.errors import EngineError, ModelNotFoundError, MotetError, NotFoundError, NoWorkerError, RequestError

LISTED_TIMEOUT_S = 5.0
"""Maximum time until the workers' reports, one each second, show a change."""
POLL_S = 0.05

Call = Callable[[AdapterEngine], Awaitable[None]]


@dataclass(frozen=True)
class _AdapterWorker:
    id: str
    engine: AdapterEngine
    models: frozenset[str]
    """The adapters and other names that the worker lists."""


class AdapterControl:
    """Loads and unloads adapters, one change at a time."""

    def __init__(self, workers: Callable[[], Sequence[WorkerReport]]) -> None:
        self._workers = workers
        self._lock = asyncio.Lock()

    async def load(self, name: str, path: str, *, base: str | None, in_place: bool) -> None:
        """Loads an adapter from a path on the workers' machines or from a hub. `base`: its base model, required if the
        workers have several. `in_place`: True to replace an adapter with this name. Returns when the adapter can be
        requested. Raises MotetError, and then the workers that lacked the adapter do not have it."""
        async with self._lock:
            workers = self._workers_of(base)
            if any(name == worker.engine.info.model for worker in workers):
                raise RequestError(f"{name!r} is the name of the base model.", param="lora_name", code="invalid_value")
            new = [worker for worker in workers if name not in worker.models]
            if not new and not in_place:
                message = f"The workers already have the adapter {name!r}. Set 'load_inplace' to true to replace it."
                raise RequestError(message, param="lora_name", code="adapter_exists")
            changed = workers if in_place else new
            loaded, error = await _each(changed, lambda engine: engine.load_adapter(name, path, in_place=in_place))
            if error is not None:
                await _each([one for one in loaded if one in new], lambda engine: engine.unload_adapter(name))
                raise error
            await self._until(name, {worker.id for worker in workers}, listed=True)

    async def unload(self, name: str) -> None:
        """Removes an adapter from all workers that have it. Raises MotetError if no worker has it, or if a worker
        cannot remove it."""
        async with self._lock:
            workers = [worker for worker in self._answering() if name in worker.models]
            if not workers:
                raise ModelNotFoundError(f"No worker has the adapter {name!r}.", param="lora_name")
            _, error = await _each(workers, lambda engine: engine.unload_adapter(name))
            if error is not None:
                raise error
            await self._until(name, {worker.id for worker in workers}, listed=False)

    def _answering(self) -> list[_AdapterWorker]:
        return [
            _AdapterWorker(report.id, report.worker.engine, frozenset(report.models))
            for report in self._workers()
            if report.state in ANSWERING
            and report.worker is not None
            and isinstance(report.worker.engine, AdapterEngine)
        ]

    def _workers_of(self, base: str | None) -> list[_AdapterWorker]:
        """Returns the workers of a base model; None for the only one. Raises MotetError."""
        workers = self._answering()
        if not workers:
            if any(one.kind is EngineKind.VLLM or (one.kind is None and one.worker is None) for one in self._workers()):
                raise NoWorkerError("No worker that can load adapters answers at this moment.")
            message = "This server has no vLLM workers, and Motet's own engines have no adapters."
            raise NotFoundError(message, code="no_adapters")
        bases = sorted({worker.engine.info.model for worker in workers})
        if base is None and len(bases) > 1:
            message = f"The vLLM workers have several models ({', '.join(bases)}): name one in 'base_model_name'."
            raise RequestError(message, param="base_model_name", code="missing_required_parameter")
        found = [worker for worker in workers if base in (None, worker.engine.info.model)]
        if not found:
            message = f"No vLLM worker has the model {base!r}. Their models: {', '.join(bases)}."
            raise ModelNotFoundError(message, param="base_model_name")
        return found

    async def _until(self, name: str, ids: set[str], *, listed: bool) -> None:
        """Waits until the reports of these workers show the change. A worker that is lost is not waited for."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + LISTED_TIMEOUT_S
        while any(worker.id in ids and (name in worker.models) != listed for worker in self._answering()):
            if loop.time() > deadline_s:
                raise NoWorkerError(f"The workers did not report the change of {name!r} in {LISTED_TIMEOUT_S:g} s.")
            await asyncio.sleep(POLL_S)


async def _each(workers: Sequence[_AdapterWorker], call: Call) -> tuple[list[_AdapterWorker], MotetError | None]:
    """Calls all workers at the same time. Returns the workers that succeeded, and the first error, which names its
    worker."""
    answers = await asyncio.gather(*(call(worker.engine) for worker in workers), return_exceptions=True)
    succeeded, error = [], None
    for worker, answer in zip(workers, answers, strict=True):
        if answer is None:
            succeeded.append(worker)
        elif not isinstance(answer, MotetError):
            raise answer
        elif error is None:
            message = f"{worker.id}: {answer.message}"
            error = RequestError(message) if isinstance(answer, RequestError) else EngineError(message)
    return succeeded, error
