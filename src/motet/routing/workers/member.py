"""One worker as its fleet knows it, from when it is first named until it is removed, with its refusals and faults."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from motet.engine import Worker, WorkerReport, WorkerState
from motet.engine_info import (
    AdapterInfo,
    EngineInfo,
    EngineKind,
    ModelCard,
    adapter_in,
    fingerprint_of,
    version_of,
    weights_of,
)
from motet.ids import ModelName
from motet.routing.workers.open_groups import OpenGroups
from motet.routing.workers.worker_facts import PairKey, WorkerFacts, WorkerModels, facts_of, models_of
from motet.routing.workers.worker_load import WorkerLoad

REFUSAL_S = 0.5
"""Seconds for which a worker that refused a group is avoided."""
DISTRUST_S = 2.0
MAX_DISTRUST_S = 60.0
"""A worker that sent invalid data gets no groups for `DISTRUST_S` seconds. If it sends invalid data again within
`MAX_DISTRUST_S` after that, the duration doubles, up to `MAX_DISTRUST_S`."""


class WorkerFaults:
    """Refusals, invalid data and deaths of one worker. A restart of the worker clears only the refusals."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.deaths = 0
        """Number of times that the worker was found dead."""
        self._clock = clock
        self._refused_until_s = clock()
        self._distrust_s = 0.0
        """Duration of the last distrust."""
        self._distrusted_until_s = clock()

    @property
    def refused(self) -> bool:
        """True for `REFUSAL_S` after the worker refused a group: it is chosen only if no other is available."""
        return self._clock() < self._refused_until_s

    def record_refusal(self) -> None:
        self._refused_until_s = self._clock() + REFUSAL_S

    def forget_refusal(self) -> None:
        self._refused_until_s = self._clock()

    @property
    def distrusted(self) -> bool:
        """True for some time after the worker sent invalid data: it gets no groups, whatever it reports."""
        return self._clock() < self._distrusted_until_s

    def distrust(self) -> None:
        """Records that the worker sent invalid data."""
        now_s = self._clock()
        again = now_s < self._distrusted_until_s + MAX_DISTRUST_S and self._distrust_s > 0
        self._distrust_s = min(2 * self._distrust_s, MAX_DISTRUST_S) if again else DISTRUST_S
        self._distrusted_until_s = now_s + self._distrust_s


class Member:
    """A worker with its state, the facts about its engine, its load, and the groups that are open on it. Only its
    `Fleet` changes a member, because it informs the tasks that wait for a change. The code that gives the worker a
    group changes the load and the groups."""

    def __init__(
        self, id: str, address: str, *, facts: WorkerFacts, load: WorkerLoad, groups: OpenGroups, faults: WorkerFaults
    ) -> None:
        """`facts`: the facts that are known before the worker has been reached."""
        self.id = id
        self.address = address
        self.state = WorkerState.STARTING
        self.note = ""
        """The reason for the state. Empty if none was given."""
        self.given_up = False
        """True if the worker is not expected to return."""
        self.worker: Worker | None = None
        """The worker's engine. None until it has been reached, and for a worker that takes texts."""
        self.facts = facts
        self.models = WorkerModels()
        self.load = load
        self.groups = groups
        self.faults = faults
        self.last_decision: str | None = None
        """The reason why the worker got its last group."""

    def has_weights(self, model_digest: str, *, model: str) -> bool:
        """Returns True unless the worker's engine reports weights with another digest (`weights_of`) for the model."""
        present = "" if self.worker is None else weights_of(self.worker.engine.info, model)
        return not present or present == model_digest

    def pair_key(self, model: str) -> PairKey | None:
        """Returns what must be equal on the worker with which this one exchanges KV of the model. None if the worker
        has not been reached yet."""
        key, adapter = self.facts.pair_key, self._adapter(model)
        return key if key is None or adapter is None else key._replace(adapter=adapter.digest)

    def adapter_in_names(self, model: str) -> str:
        """Returns the adapter's part of the names of the engine's blocks (`block_names`); empty for a base model. Other
        servers publish blocks with the name of the adapter, and not with its digest."""
        adapter = self._adapter(model)
        if adapter is not None and self.worker is not None and self.worker.local:
            return adapter.digest
        card = self.models.by_name.get(ModelName(model))
        return "" if card is None or card.parent is None else model

    def _adapter(self, model: str) -> AdapterInfo | None:
        return None if self.worker is None else adapter_in(self.worker.engine.info, model)

    def info_of(self, model: str) -> EngineInfo | None:
        """Returns the engine's facts for this model. None if the worker has no engine, or does not serve the model."""
        if self.worker is None or not self.models.has(model):
            return None
        info = self.worker.engine.info
        if not model or model == info.model:
            return info
        card = self.models.by_name[ModelName(model)]
        return msgspec.structs.replace(
            info,
            model=card.name,
            max_model_len=card.max_model_len,
            fingerprint=fingerprint_of(info, model),
            weight_version=version_of(info, model),
            adapters=(),
        )

    def returned(self, worker: Worker | None) -> None:
        """Records that the worker is available, for the first time or again. `worker`: None if it takes texts."""
        self.load, self.groups = self.load.next_start(), self.groups.next_start()
        self.given_up = False
        self.faults.forget_refusal()
        self.worker = worker
        if worker is not None:
            self.address = worker.address
        self.refresh_facts()

    def refresh_facts(self) -> None:
        """Reads the facts about the engine, which change when the worker returns and when it gets new weights or
        adapters."""
        if self.worker is None:
            self.facts = replace(self.facts, kind=EngineKind.OPENAI)
        else:
            self.facts = facts_of(self.worker.engine.info, local=self.worker.local)
        self.set_models(self.models.additional)

    def set_models(self, cards: Iterable[ModelCard]) -> None:
        """Records the models that the worker serves from now on, in addition to the models in its engine's facts."""
        self.models = models_of(cards, None if self.worker is None else self.worker.engine.info)

    def report(self) -> WorkerReport:
        return WorkerReport(
            id=self.id,
            address=self.address,
            state=self.state,
            role=self.facts.role,
            worker=self.worker,
            last_decision=self.last_decision,
            note=self.note or None,
            kind=self.facts.kind,
            models=self.models.others(None if self.worker is None else self.worker.engine.info.model),
            resumable=not self.facts.takes_texts,
        )
