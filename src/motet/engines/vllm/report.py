"""The report of a vLLM server, made from its Prometheus metrics and its lists, in the form of a Motet worker. Pure.

The metrics are read every second for every worker. Motet needs two dozen of their thousand lines, so lines are selected
by name before their labels are parsed.

vLLM does not report its vocabulary, its end-of-sequence tokens, or the number of choices that it runs at once, so these
are unknown. If it does not report its blocks either, Motet assumes that there are enough: vLLM queues requests itself.
Its block events are followed if it has one publisher: with several data-parallel ranks vLLM chooses the rank of a
request, so it is unknown which rank will have a prefix.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from motet.engine import WorkerState
from motet.engine_info import EngineInfo, EngineKind, ModelCard
from motet.engines.openai import ListedModel, ListedModels, read_json
from motet.engines.wire import EngineReport
from motet.errors import ConfigError, OtherServerError
from motet.ids import ModelName
from motet.metrics.stats import EngineStats
from motet.sampling_defaults import FIELD_NAMES, read_defaults
from motet.transfer.ticket import TransferAddress
from motet.types import Role, SamplingParams

NEUTRAL = {name: getattr(SamplingParams(max_tokens=1), name) for name in FIELD_NAMES.values()}
START = b"process_start_time_seconds"
CONFIG = b"vllm:cache_config_info"
USAGE = b"vllm:kv_cache_usage_perc"
BY_SOURCE = b"vllm:prompt_tokens_by_source_total"
HITS = b"vllm:prefix_cache_hits_total"
TRANSFERS = b"vllm:nixl_xfer_time_seconds_count"
TRANSFER_SECONDS = b"vllm:nixl_xfer_time_seconds_sum"
FAILED_TRANSFERS = b"vllm:nixl_num_failed_transfers_total"

COUNTED: Mapping[str, bytes] = {
    "choices_running": b"vllm:num_requests_running",
    "choices_waiting": b"vllm:num_requests_waiting",
    "prompt_tokens": b"vllm:prompt_tokens_total",
    "generated_tokens": b"vllm:generation_tokens_total",
    "preemptions": b"vllm:num_preemptions_total",
    "transfers": TRANSFERS,
    "transfer_bytes": b"vllm:nixl_bytes_transferred_sum",
    "transfer_descriptors": b"vllm:nixl_num_descriptors_sum",
    "leases_expired": b"vllm:nixl_num_kv_expired_reqs_total",
}
"""Fields of `EngineStats` and the vLLM metrics that fill them, summed over ranks."""
SERIES = frozenset({START, CONFIG, USAGE, BY_SOURCE, HITS, TRANSFER_SECONDS, FAILED_TRANSFERS, *COUNTED.values()})

_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')

NO_REASON = "untold"
"""Label of every failed transfer: vLLM counts them without a reason."""

MAX_NUM_SEQS = 1024
"""Assumed maximum number of running choices, vLLM's default maximum. A server with fewer queues the others itself, so
a number that is too high costs less than one that delays choices."""
BLOCK_SIZE = 16
"""Assumed block size of a server that does not report it, vLLM's default on a GPU."""
TICKET_READERS = 1

ANY_HOST = ("*", "0.0.0.0", "::", "[::]")
"""Hosts on which a publisher can listen, but to which a client cannot connect."""


@dataclass(frozen=True, kw_only=True)
class VLLMScrape:
    """One scrape of a server's metrics, summed over data-parallel ranks."""

    start_s: float | None
    """Start of the server process in Unix time; None with several processes, which do not report it."""
    block_size: int
    cache_dtype: str
    """Configured data type of the KV cache; `auto` for the model's type."""
    ranks: int
    connector: bool
    """True if the server has a NIXL connector; other connectors are not reported."""
    stats: EngineStats


@dataclass(frozen=True)
class _Sample:
    labels: Mapping[bytes, bytes]
    value: float

    @property
    def rank(self) -> bytes:
        return self.labels.get(b"engine", b"0")


def scrape_of(text: bytes) -> VLLMScrape:
    """Parses the metrics of a server. Raises OtherServerError if it is not a vLLM server."""
    try:
        samples = _samples(text)
        if not samples[CONFIG]:
            raise OtherServerError("it publishes no metrics of vLLM; vLLM does, unless run with --disable-log-stats")
        return _scrape(samples)
    except (ValueError, OverflowError) as error:
        raise OtherServerError(f"its metrics cannot be read: {error}") from error


def _scrape(samples: Mapping[bytes, Sequence[_Sample]]) -> VLLMScrape:
    def total(name: bytes) -> int:
        return round(sum(sample.value for sample in samples[name]))

    def prompt_from(source: bytes) -> int:
        return round(sum(sample.value for sample in samples[BY_SOURCE] if sample.labels.get(b"source") == source))

    configs = {sample.rank: sample.labels for sample in samples[CONFIG]}
    config = next(iter(configs.values()))
    blocks = {rank: _count(labels.get(b"num_gpu_blocks", b"")) for rank, labels in configs.items()}
    stats = EngineStats(
        blocks_total=sum(blocks.values()),
        blocks_used=round(sum(sample.value * blocks.get(sample.rank, 0) for sample in samples[USAGE])),
        transfer_seconds_sum=sum(sample.value for sample in samples[TRANSFER_SECONDS]),
        transfer_failures={NO_REASON: failed} if (failed := total(FAILED_TRANSFERS)) else {},
    )
    for name, series in COUNTED.items():
        setattr(stats, name, total(series))
    if samples[BY_SOURCE]:
        stats.cached_tokens, stats.prefill_tokens = prompt_from(b"local_cache_hit"), prompt_from(b"local_compute")
    else:  # older servers do not separate the sources
        stats.cached_tokens = total(HITS)
        stats.prefill_tokens = max(0, stats.prompt_tokens - stats.cached_tokens)
    return VLLMScrape(
        start_s=samples[START][-1].value if samples[START] else None,
        block_size=_count(config.get(b"block_size", b"")),
        cache_dtype=config.get(b"cache_dtype", b"auto").decode(errors="replace"),
        ranks=len(configs),
        connector=bool(samples[TRANSFERS]),
        stats=stats,
    )


def _samples(text: bytes) -> Mapping[bytes, Sequence[_Sample]]:
    """Returns the samples of each series. Raises ValueError for a sample without a number."""
    found: dict[bytes, list[_Sample]] = {name: [] for name in SERIES}
    for line in text.split(b"\n"):
        name = line[: line.find(b"{")] if b"{" in line else line.partition(b" ")[0]
        if name in found:
            labels, _, value = line.rpartition(b" ")
            found[name].append(_Sample(dict(_LABEL.findall(labels)), float(value)))
    return found


def _count(label: bytes) -> int:
    """Returns the number in a label; 0 if it is unknown."""
    return int(label) if label.isdigit() else 0


class _Version(msgspec.Struct):
    version: str


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """A rank in `GET /kv_event_sources`."""

    endpoint: str
    replay_endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServerStart:
    """The facts about a server that change only when it is restarted."""

    engine_id: str
    version: str
    events: EventSource | None
    """Publisher of block events; None if there is none, or if there are several."""
    defaults: dict[str, int | float] | None = None
    """The defaults of sampling fields; None if the server applies them itself, or does not report them."""


class _Rendered(msgspec.Struct):
    sampling_params: dict[str, object]


def defaults_in(body: bytes, *, num_free: int) -> dict[str, int | float] | None:
    """Returns the defaults of sampling fields in a rendered request without sampling fields; None if there are none
    that Motet could use. `num_free`: number of tokens that its prompt leaves. Raises OtherServerError."""
    rendered = read_json(body, list[_Rendered], error=OtherServerError, what="its rendered request")
    params = rendered[0].sampling_params if rendered else {}
    given = {name: value for name, own in FIELD_NAMES.items() if (value := params.get(own)) is not None}
    try:
        defaults = read_defaults(given)
    except ConfigError:
        return None
    return {name: value for name, value in defaults.items() if value != {**NEUTRAL, "max_tokens": num_free}[name]}


def cards_in(body: bytes) -> tuple[ListedModel, ...]:
    """Parses `GET /v1/models`, base models before adapters. Raises OtherServerError."""
    cards = read_json(body, ListedModels, error=OtherServerError, what="its list of models").data
    ordered = sorted(cards, key=lambda card: card.parent is not None)
    if not ordered or ordered[0].parent is not None or ordered[0].max_model_len is None:
        raise OtherServerError("it lists no model with its max_model_len")
    return tuple(ordered)


def version_in(body: bytes) -> str:
    return read_json(body, _Version, error=OtherServerError, what="its version").version


def event_source_in(body: bytes) -> EventSource | None:
    by_rank = read_json(body, dict[str, EventSource], error=OtherServerError, what="its kv_event_sources")
    return next(iter(by_rank.values())) if len(by_rank) == 1 else None


def report_of(
    url: str, start: ServerStart, *, scrape: VLLMScrape, cards: Sequence[ListedModel], role: Role | None
) -> EngineReport:
    address = urlsplit(url)
    host = address.hostname or ""
    port = address.port or (443 if address.scheme == "https" else 80)
    own, *others = cards
    max_model_len = own.max_model_len or 0
    block_size = scrape.block_size or BLOCK_SIZE
    source = start.events if scrape.ranks == 1 else None
    return EngineReport(
        version=start.version,
        engine_id=start.engine_id,
        state=WorkerState.READY,
        info=EngineInfo(
            model=ModelName(own.id),
            root=own.root or "",
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=scrape.stats.blocks_total or MAX_NUM_SEQS * -(-max_model_len // block_size),
            max_num_seqs=MAX_NUM_SEQS,
            role=role or Role.BOTH,
            dtype=scrape.cache_dtype,
            device="remote",
            fingerprint=f"vllm-{start.version}-{own.id}",
            transfer=TransferAddress(start.engine_id, host, port) if role or scrape.connector else None,
            kind=EngineKind.VLLM,
            default_sampling_params=start.defaults,
            ticket_readers=TICKET_READERS,
        ),
        stats=scrape.stats,
        block_events=reachable(source.endpoint, host) if source else None,
        block_replay=reachable(source.replay_endpoint, host) if source and source.replay_endpoint else None,
        models=tuple(
            ModelCard(
                name=ModelName(card.id),
                root=card.root or "",
                parent=ModelName(card.parent) if card.parent else None,
                max_model_len=card.max_model_len or max_model_len,  # an adapter's card does not have it
            )
            for card in others
        ),
    )


def reachable(endpoint: str, host: str) -> str:
    """Returns the address to connect to for an endpoint, which can be bound to every address of the server `host`."""
    scheme, separator, rest = endpoint.partition("://")
    bound, colon, port = rest.rpartition(":")
    if scheme != "tcp" or bound not in ANY_HOST:
        return endpoint
    return f"{scheme}{separator}{f'[{host}]' if ':' in host else host}{colon}{port}"
