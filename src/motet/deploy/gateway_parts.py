"""What a gateway is made with: who names its workers, what their models are, and how they are looked after."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from motet.deploy.discover import FoundServer
from motet.deploy.remote_keeper import HEARTBEAT_S
from motet.engines.wire import EngineReport
from motet.routing.text_routed import TextRouted
from motet.settings.named_worker import NamedWorker


class WorkerList(Protocol):
    """Says who is to be a worker, and may change its mind."""

    @property
    def named(self) -> Sequence[NamedWorker]:
        """As it was said last."""
        ...

    async def next(self) -> Sequence[NamedWorker]:
        """What is said next, which may be the same again. May be cancelled."""
        ...


class LearnedModels(Protocol):
    """What is known of the models that workers have."""

    @property
    def texts(self) -> TextRouted:
        """Who answers for models that only text upstreams have."""
        ...

    async def learn(self, report: EngineReport, server: FoundServer) -> None:
        """All that a worker takes before it can be used. Raises EngineError if that is not to be had."""
        ...


@dataclass(frozen=True)
class GatewayRules:
    """How workers are looked after."""

    drain_s: float
    """How long the groups of a worker that is not listed any more have."""
    heartbeat_s: float = HEARTBEAT_S
    """Between two questions to a worker how it is."""
    introduces: bool = True
    """Whether those that exchange KV are made to meet before they get a group; False: they see to it themselves."""
