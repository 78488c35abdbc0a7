"""The figures of a vLLM server, out of its Prometheus text. Pure.

The text has about a thousand lines, of which two dozen are of use, and is read every second for every worker: so lines
are looked up by name, and the labels of no others are read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motet.errors import OtherServerError
from motet.types import EngineStats

START = b"process_start_time_seconds"
CONFIG = b"vllm:cache_config_info"
RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
USAGE = b"vllm:kv_cache_usage_perc"
PROMPT = b"vllm:prompt_tokens_total"
BY_SOURCE = b"vllm:prompt_tokens_by_source_total"
HITS = b"vllm:prefix_cache_hits_total"
GENERATED = b"vllm:generation_tokens_total"
PREEMPTIONS = b"vllm:num_preemptions_total"
TRANSFERS = b"vllm:nixl_xfer_time_seconds_count"
TRANSFER_SECONDS = b"vllm:nixl_xfer_time_seconds_sum"
TRANSFER_BYTES = b"vllm:nixl_bytes_transferred_sum"
TRANSFER_DESCRIPTORS = b"vllm:nixl_num_descriptors_sum"
FAILED_TRANSFERS = b"vllm:nixl_num_failed_transfers_total"
EXPIRED = b"vllm:nixl_num_kv_expired_reqs_total"

WANTED = frozenset(
    {
        START,
        CONFIG,
        RUNNING,
        WAITING,
        USAGE,
        PROMPT,
        BY_SOURCE,
        HITS,
        GENERATED,
        PREEMPTIONS,
        TRANSFERS,
        TRANSFER_SECONDS,
        TRANSFER_BYTES,
        TRANSFER_DESCRIPTORS,
        FAILED_TRANSFERS,
        EXPIRED,
    }
)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')

UNTOLD = "untold"
"""The kind of a failed transfer: vLLM counts them without saying why."""


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """One reading. Figures of several data-parallel ranks are added up."""

    start_s: float | None
    """When its process started, in Unix time; None: several processes answer, and none of them tells."""
    block_size: int
    num_blocks: int
    cache_dtype: str
    """As it was configured: `auto` is the model's."""
    ranks: int
    """Data-parallel ones."""
    running: int
    waiting: int
    blocks_used: int
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that were neither found in the prefix cache nor fetched."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    generated_tokens: int
    preemptions: int
    connector: bool
    """Whether it has a NIXL connector; of others it does not tell."""
    transfers: int
    transfer_bytes: int
    transfer_descriptors: int
    transfer_seconds_sum: float
    transfers_failed: int
    leases_expired: int
    """Tickets of this server that nobody fetched in time."""


@dataclass(frozen=True)
class _Sample:
    labels: Mapping[bytes, bytes]
    value: float

    @property
    def rank(self) -> bytes:
        return self.labels.get(b"engine", b"0")


def scrape_of(text: bytes) -> Scrape:
    """Raises OtherServerError if these are not the figures of a vLLM server."""
    try:
        samples = _samples(text)
        if not samples[CONFIG]:
            raise OtherServerError("it publishes no figures of vLLM; vLLM does, unless run with --disable-log-stats")
        return _scrape(samples)
    except (ValueError, OverflowError) as error:
        raise OtherServerError(f"its figures cannot be read: {error}") from error


def stats_of(scrape: Scrape) -> EngineStats:
    return EngineStats(
        choices_running=scrape.running,
        choices_waiting=scrape.waiting,
        blocks_total=scrape.num_blocks,
        blocks_used=scrape.blocks_used,
        prompt_tokens=scrape.prompt_tokens,
        prefill_tokens=scrape.computed_tokens,
        cached_tokens=scrape.cached_tokens,
        generated_tokens=scrape.generated_tokens,
        preemptions=scrape.preemptions,
        transfers=scrape.transfers,
        transfer_bytes=scrape.transfer_bytes,
        transfer_descriptors=scrape.transfer_descriptors,
        transfer_seconds_sum=scrape.transfer_seconds_sum,
        transfer_failures={UNTOLD: scrape.transfers_failed} if scrape.transfers_failed else {},
        leases_expired=scrape.leases_expired,
    )


def _scrape(samples: Mapping[bytes, Sequence[_Sample]]) -> Scrape:
    def total(name: bytes) -> int:
        return round(sum(sample.value for sample in samples[name]))

    def prompt_from(source: bytes) -> int:
        return round(sum(sample.value for sample in samples[BY_SOURCE] if sample.labels.get(b"source") == source))

    configs = {sample.rank: sample.labels for sample in samples[CONFIG]}
    config = next(iter(configs.values()))
    blocks = {rank: _count(labels.get(b"num_gpu_blocks", b"")) for rank, labels in configs.items()}
    prompt_tokens = total(PROMPT)
    sources = bool(samples[BY_SOURCE])  # older servers do not tell them apart
    cached_tokens = prompt_from(b"local_cache_hit") if sources else total(HITS)
    return Scrape(
        start_s=samples[START][-1].value if samples[START] else None,
        block_size=_count(config.get(b"block_size", b"")),
        num_blocks=sum(blocks.values()),
        cache_dtype=config.get(b"cache_dtype", b"auto").decode(errors="replace"),
        ranks=len(configs),
        running=total(RUNNING),
        waiting=total(WAITING),
        blocks_used=round(sum(sample.value * blocks.get(sample.rank, 0) for sample in samples[USAGE])),
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_from(b"local_compute") if sources else prompt_tokens - cached_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=total(GENERATED),
        preemptions=total(PREEMPTIONS),
        connector=bool(samples[TRANSFERS]),
        transfers=total(TRANSFERS),
        transfer_bytes=total(TRANSFER_BYTES),
        transfer_descriptors=total(TRANSFER_DESCRIPTORS),
        transfer_seconds_sum=sum(sample.value for sample in samples[TRANSFER_SECONDS]),
        transfers_failed=total(FAILED_TRANSFERS),
        leases_expired=total(EXPIRED),
    )


def _samples(text: bytes) -> Mapping[bytes, Sequence[_Sample]]:
    """Those wanted, by name; ValueError for one that has no number."""
    found: dict[bytes, list[_Sample]] = {name: [] for name in WANTED}
    for line in text.split(b"\n"):
        name = line[: line.find(b"{")] if b"{" in line else line.partition(b" ")[0]
        if name in WANTED:
            labels, _, value = line.rpartition(b" ")
            found[name].append(_Sample(dict(_LABEL.findall(labels)), float(value)))
    return found


def _count(label: bytes) -> int:
    """0: not known."""
    return int(label) if label.isdigit() else 0
