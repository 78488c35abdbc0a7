"""Computes from measured prices how many gateways a cell needs, and what its size costs each part. Pure.

Every gateway knows every worker of its cell: it asks each for its status, follows the blocks of each, and may choose
any. So a gateway has work that grows with the number of workers before it passes a token on (`standing`), and a worker
answers more requests the more gateways there are. The rest of a gateway's core passes tokens on.
"""

from dataclasses import dataclass
from math import ceil

USED = 0.7
"""Share of a gateway's core that may be used; the rest is for bursts and the garbage collector."""
LOOKS = 4
"""Decisions for a group where prefill and decode are apart: one at either side to see if prefill pays, then one to
choose at either. A group needs one where they are not apart."""


@dataclass(frozen=True)
class Prices:
    """Prices in microseconds of a core, and in bytes."""

    token_us: float
    """Price of a token that the gateway passes on."""
    question_us: float
    """Price of a status request for the gateway."""
    answer_us: float
    """Price of a status request for the worker."""
    message_us: float
    """Price of a message of block events, which is about one group on one worker."""
    decision_us: float
    """Price of one decision in a fleet of this size."""
    block_bytes: float
    """Bytes of the index for a block and a holder."""


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
        """Returns the rate of block events: each side stores a prompt and removes another one, in one message."""
        return self.groups_per_s * (2 if self.prefill else 1)


@dataclass(frozen=True)
class Need:
    standing: float
    """Share of each gateway's core that status requests and block events take."""
    busy: float
    """Number of cores that tokens and decisions take in all gateways together."""
    gateways: int | None
    """Number of gateways; None if a gateway is full before it passes a token on."""
    answering: float
    """Share of the core of each worker's API process that status requests take; 0 if `gateways` is None."""
    connections: int
    """Connections that each idle gateway keeps open: one for requests and one for block events to every worker."""
    pairs: int
    """Connections for KV: from every decode worker to every prefill worker."""
    index_gb: float
    """Size of the index in each gateway."""


def need(demand: Demand, prices: Prices) -> Need:
    standing = (demand.workers * prices.question_us + demand.messages_per_s * prices.message_us) / 1e6
    looks = LOOKS if demand.prefill else 1
    tokens = demand.decode * demand.tokens_per_s
    busy = (tokens * prices.token_us + demand.groups_per_s * looks * prices.decision_us) / 1e6
    left = USED - standing
    gateways = max(1, ceil(busy / left)) if left > 0 else None
    return Need(
        standing=standing,
        busy=busy,
        gateways=gateways,
        answering=(gateways or 0) * prices.answer_us / 1e6,
        connections=2 * demand.workers,
        pairs=demand.decode * demand.prefill,
        index_gb=demand.workers * demand.blocks_a_worker * prices.block_bytes / 1e9,
    )
