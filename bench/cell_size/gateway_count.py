"""Computes the number of gateways of a cell, and the cost of its size for each part, from measured prices.

Every gateway knows every worker of its cell: it sends status requests to each worker, follows the block events of each
worker, and can choose any worker. So a gateway has work that grows with the number of workers before it passes on a
token (`standing`), and a worker answers more status requests if there are more gateways. The rest of a gateway's core
passes on tokens.
"""

from dataclasses import dataclass
from math import ceil

USED = 0.7
"""Share of a gateway's core that is planned to be used. The rest is for bursts and the garbage collector."""
DECISIONS = 4
"""Number of decisions for a group if prefill and decode are separate: one for each side to see if separate prefill
pays, then one for each side to choose a worker. Otherwise a group needs one decision."""


@dataclass(frozen=True)
class Prices:
    """Prices in microseconds of a core, and in bytes."""

    token_us: float
    """Price of a token that the gateway passes on."""
    status_request_us: float
    """Price of a status request for the gateway."""
    status_answer_us: float
    """Price of a status request for the worker."""
    message_us: float
    """Price of a message of block events, which describes about one group on one worker."""
    decision_us: float
    """Price of one decision in a fleet of this size."""
    block_bytes: float
    """Size in the index of a block and one of its holders."""


@dataclass(frozen=True)
class Demand:
    """A cell and its load."""

    decode: int
    prefill: int
    tokens_per_s: float
    """Rate of each decode worker."""
    choices: int = 8
    tokens_a_choice: int = 256
    blocks_a_worker: int = 1000

    @property
    def workers(self) -> int:
        return self.decode + self.prefill

    @property
    def groups_per_s(self) -> float:
        return self.decode * self.tokens_per_s / (self.choices * self.tokens_a_choice)

    @property
    def messages_per_s(self) -> float:
        """Returns messages of block events per second. Each side stores one prompt and removes another in one
        message."""
        return self.groups_per_s * (2 if self.prefill else 1)


@dataclass(frozen=True)
class GatewayNeeds:
    standing: float
    """Share of each gateway's core for status requests and block events."""
    busy: float
    """Number of cores for tokens and decisions, in all gateways together."""
    gateways: int | None
    """Number of gateways. None if a gateway's core is full before the gateway passes on a token."""
    answering: float
    """Share of the core of each worker's API process for status requests; 0 if `gateways` is None."""
    connections: int
    """Connections that each idle gateway keeps open: one for requests and one for block events to every worker."""
    pairs: int
    """Number of connections for KV transfer: from every decode worker to every prefill worker."""
    index_gb: float
    """Size of the index in each gateway."""


def gateway_needs(demand: Demand, prices: Prices) -> GatewayNeeds:
    standing = (demand.workers * prices.status_request_us + demand.messages_per_s * prices.message_us) / 1e6
    decisions = DECISIONS if demand.prefill else 1
    tokens = demand.decode * demand.tokens_per_s
    busy = (tokens * prices.token_us + demand.groups_per_s * decisions * prices.decision_us) / 1e6
    left = USED - standing
    gateways = max(1, ceil(busy / left)) if left > 0 else None
    return GatewayNeeds(
        standing=standing,
        busy=busy,
        gateways=gateways,
        answering=(gateways or 0) * prices.status_answer_us / 1e6,
        connections=2 * demand.workers,
        pairs=demand.decode * demand.prefill,
        index_gb=demand.workers * demand.blocks_a_worker * prices.block_bytes / 1e9,
    )
