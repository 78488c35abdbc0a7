"""The counters of a running server, read from its /metrics, for programs that tell what a request cost."""

from dataclasses import dataclass, fields

import httpx
from prometheus_client.parser import text_string_to_metric_families

from motet.errors import EngineError
from motet.metrics.names import PREFIX

CACHE_FACTS = f"{PREFIX}cache_config_info"


@dataclass(frozen=True)
class Figures:
    """Counters of one moment, summed over the workers; the difference of two is what happened between them."""

    prompt_tokens: int
    prefill_tokens: int
    generation_tokens: int
    forks: int
    blocks_shared: int
    bytes_saved: int
    trunk_tokens_read: int
    trunk_tokens_unshared: int
    prefills: int
    kv_transfers: int
    kv_transfer_bytes: int
    recomputed_tokens: int

    def __sub__(self, earlier: "Figures") -> "Figures":
        return Figures(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


@dataclass(frozen=True)
class BlockSize:
    """A KV block of the workers: they are alike, or could not share KV."""

    tokens: int
    bytes: int

    def bytes_of(self, num_tokens: int) -> int:
        """KV bytes of the blocks that hold so many tokens."""
        return -(-num_tokens // self.tokens) * self.bytes


def read_figures(client: httpx.Client) -> Figures:
    """Asks the server that `client` is bound to."""
    return figures_in(read_metrics(client))


def read_block_size(client: httpx.Client) -> BlockSize:
    return block_size_in(read_metrics(client))


def read_metrics(client: httpx.Client) -> str:
    response = client.get("/metrics")
    if response.status_code != httpx.codes.OK:
        raise EngineError(f"/metrics answered {response.status_code}")
    return response.text


def figures_in(exposition: str) -> Figures:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return Figures(**{f.name: int(values[f"{PREFIX}{f.name}_total"]) for f in fields(Figures)})


def block_size_in(exposition: str) -> BlockSize:
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == CACHE_FACTS:
                return BlockSize(int(sample.labels["block_size"]), int(sample.labels["bytes_per_block"]))
    raise EngineError(f"/metrics says nothing of {CACHE_FACTS}")
