"""The part of a worker to which a client is entitled, as the router sees it.

    part     weight of the client / sum of the weights of all clients that have open groups on the worker, or groups
             that wait for it in the router. All choices that other servers gave the worker count as one more client
             with weight 1

The worker's engine divides itself in the same way, between the clients whose groups it has
(`engines.native.scheduling.clients`). Both are max-min fair over choices and KV blocks, as in dominant resource
fairness (Ghodsi et al., "Dominant resource fairness: fair allocation of multiple resource types", 2011): no client gets
more than its part while another client waits with less than its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from motet.engine_info import EngineKind
from motet.routing.workers.member import Member

FOREIGN_WEIGHT = 1.0
"""Weight of all choices together that other servers gave a worker: this server does not know their clients."""


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The choices and blocks that a client holds on a worker, and the part to which it is entitled."""

    open_choices: int
    held_blocks: int
    part: float
    """The part of the worker to which the client is entitled, at most 1."""
    fair: bool
    """True if the worker's engine divides itself between clients: it starts a group within its client's part at once,
    and any other group as soon as one of its choices can run. Other engines start choices in order of arrival."""


class WaitingWeights:
    """The weights of the clients that have waiting groups, within one iteration of the event loop."""

    def __init__(self, by_model: Mapping[str, Mapping[str, float]]) -> None:
        """`by_model`: weights by client, for each model that groups wait for."""
        self._by_model = by_model
        self._merged: dict[tuple[str, ...], tuple[Mapping[str, float], float]] = {}
        """Weights by client and their sum, by the models for which groups wait on a worker."""
        self._totals: dict[tuple[str, int], float] = {}
        """Sum of the weights of all clients of a worker, by its id and its number of clients with open groups."""

    def share_of(self, client: str, weight: float, *, member: Member) -> WorkerShare:
        """Returns the client's share of the worker."""
        load = member.load
        waiting, waiting_total = self._waiting_for(member)
        key = member.id, len(load.clients)  # identifies the clients, which within one iteration only become more
        if (total := self._totals.get(key)) is None:
            total = waiting_total + sum(held.weight for name, held in load.clients.items() if name not in waiting)
            self._totals[key] = total = total + (FOREIGN_WEIGHT if load.foreign_choices else 0.0)
        held = load.clients.get(client)
        if held is None and client not in waiting:
            total += weight
        choices, blocks = (held.choices, held.blocks) if held is not None else (0, 0)
        return WorkerShare(choices, blocks, min(1.0, weight / total), fair=member.facts.kind is EngineKind.MOTET)

    def _waiting_for(self, member: Member) -> tuple[Mapping[str, float], float]:
        """Returns the weights of the clients that wait for the worker, and their sum."""
        models = tuple(model for model in self._by_model if member.models.has(model))
        if (found := self._merged.get(models)) is None:
            weights: dict[str, float] = {}
            for model in models:
                weights.update(self._by_model[model])
            found = self._merged[models] = weights, sum(weights.values())
        return found
