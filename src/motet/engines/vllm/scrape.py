"""The figures of a vLLM server, out of its Prometheus text. Pure."""

from dataclasses import dataclass, field

from motet.types import EngineStats


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """One reading; figures of several data-parallel ranks are added up."""

    start_s: float | None
    """When its process started, in Unix time; None: several processes answer, and none of them tells."""
    block_size: int
    num_blocks: int
    cache_dtype: str
    ranks: int
    """Data-parallel ones."""
    running: int
    waiting: int
    blocks_used: int
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    transferred_tokens: int
    generated_tokens: int
    preemptions: int
    transfers: int
    transfer_bytes: int
    transfer_descriptors: int
    transfer_seconds_sum: float
    transfer_failures: dict[str, int] = field(default_factory=dict)
    leases_expired: int


def scrape_of(text: bytes) -> Scrape:
    """Raises EngineError if it is not that of a vLLM server."""
    raise NotImplementedError


def stats_of(scrape: Scrape) -> EngineStats:
    raise NotImplementedError
