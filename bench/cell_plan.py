"""How many gateways a cell needs, and what its size costs each part: arithmetic over measured prices. Pure.

Every gateway knows every worker of its cell: it asks each how it is, follows the blocks of each, and may choose any.
So what a gateway does grows with the workers before the first token is passed on (`standing`), and what a worker
answers grows with the gateways. Only what is left of a gateway's core passes tokens on.
"""

from dataclasses import dataclass
from math import ceil

USED = 0.7
"""Of a gateway's core: what is kept free takes bursts and the garbage collector."""
LOOKS = 4
"""At the workers, for a group where prefill and decode are apart: at either side to see whether prefill pays, then one
to choose either; where they are not apart one will do."""


@dataclass(frozen=True)
class Prices:
    """Microseconds of a core."""

    token_us: float
    """Of the gateway, for each token it passes on."""
    question_us: float
    answer_us: float
    """Of the worker that is asked how it is."""
    message_us: float
    """Of block events: of one group on one worker."""
    decision_us: float
    """One look, in a fleet of this size."""
    block_bytes: float
    """Of the index, for a block and holder."""


@dataclass(frozen=True)
class Demand:
    """A cell, and what is asked of it."""

    decode: int
    prefill: int
    tokens_per_s: float
    """A decode worker."""
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
        """A prompt is stored, and another one removed, where it is prefilled and where it is decoded."""
        return self.groups_per_s * (2 if self.prefill else 1)


@dataclass(frozen=True)
class Need:
    standing: float
    """Of the core of each gateway, for questions and block events."""
    busy: float
    """Cores that tokens and decisions take, all gateways together."""
    gateways: int | None
    """None: a gateway is full before it passes a token on."""
    answering: float
    """Of the core of each worker's API process, for questions; 0 if there is no such number of gateways."""
    connections: int
    """Kept open by each gateway when idle: a question's and a subscription's to every worker."""
    pairs: int
    """Connections for KV: every decode worker to every prefill worker."""
    index_gb: float
    """In each gateway."""


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
