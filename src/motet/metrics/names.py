"""Every figure of an engine by name, kind and meaning: the source of the exposition and, by a test, of docs/metrics.md.

Names that vLLM has too mean what they mean there, with `motet:` in place of `vllm:`; what vLLM calls a request is a
choice here, since vLLM makes a request of every choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from motet.transfer.figures import SECONDS
from motet.types import EngineStats

PREFIX = "motet:"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class EngineFigure:
    """A figure that the engine keeps, read when the metrics are scraped."""

    name: str
    kind: Kind
    help: str
    read: Callable[[EngineStats], float]


@dataclass(frozen=True)
class EngineCounts:
    """A counter that the engine keeps by one label, whose values are those that have occurred."""

    name: str
    help: str
    label: str
    read: Callable[[EngineStats], Mapping[str, int]]


@dataclass(frozen=True)
class EngineHistogram:
    """A histogram that the engine keeps: `read` gives a count for each bound, of values above the bound before, and
    one for the rest; nothing at all from an engine that does not keep it."""

    name: str
    help: str
    bounds: Sequence[float]
    read: Callable[[EngineStats], Sequence[int]]
    sum: Callable[[EngineStats], float]


def _kv_usage(stats: EngineStats) -> float:
    return stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0


_C, _G = Kind.COUNTER, Kind.GAUGE

ENGINE_FIGURES = (
    EngineFigure("num_requests_running", _G, "Choices being written.", lambda s: s.choices_running),
    EngineFigure("num_requests_waiting", _G, "Choices waiting for their turn.", lambda s: s.choices_waiting),
    EngineFigure("num_groups_running", _G, "Groups with choices being written.", lambda s: s.groups_running),
    EngineFigure("num_groups_waiting", _G, "Groups waiting for their turn.", lambda s: s.groups_waiting),
    EngineFigure("kv_cache_usage_perc", _G, "Share of KV blocks held by groups; 1 means all.", _kv_usage),
    EngineFigure("kv_blocks", _G, "KV blocks there are.", lambda s: s.blocks_total),
    EngineFigure("kv_blocks_used", _G, "KV blocks held by groups.", lambda s: s.blocks_used),
    EngineFigure("kv_blocks_cached", _G, "Free KV blocks that a prefix may still hit.", lambda s: s.blocks_cached),
    EngineFigure("engine_steps", _C, "Forward passes.", lambda s: s.steps),
    EngineFigure("prompt_tokens", _C, "Prompt tokens of admitted groups, once a group.", lambda s: s.prompt_tokens),
    EngineFigure("prefill_tokens", _C, "Prompt tokens computed.", lambda s: s.prefill_tokens),
    EngineFigure("generation_tokens", _C, "Tokens generated, summed over choices.", lambda s: s.generated_tokens),
    EngineFigure("prefix_cache_queries", _C, "Prompt tokens looked up in the prefix cache.", lambda s: s.prompt_tokens),
    EngineFigure("prefix_cache_hits", _C, "Prompt tokens found in the prefix cache.", lambda s: s.cached_tokens),
    EngineFigure("num_preemptions", _C, "Choices put back for want of blocks.", lambda s: s.preemptions),
    EngineFigure("replayed_tokens", _C, "Written tokens computed again after that.", lambda s: s.replayed_tokens),
    EngineFigure("forks", _C, "Choices that joined a trunk already there.", lambda s: s.forks),
    EngineFigure("blocks_shared", _C, "KV blocks that forks did not allocate.", lambda s: s.blocks_shared),
    EngineFigure("bytes_saved", _C, "KV bytes of those blocks.", lambda s: s.bytes_saved),
    EngineFigure(
        "greedy_choices_shared", _C, "Choices answered by a greedy sibling.", lambda s: s.greedy_choices_shared
    ),
    EngineFigure("trunk_tokens_read", _C, "Trunk positions decode attention read.", lambda s: s.trunk_tokens_read),
    EngineFigure(
        "trunk_tokens_unshared",
        _C,
        "Trunk positions it would have read, once a choice.",
        lambda s: s.trunk_tokens_unshared,
    ),
    EngineFigure("prefills", _C, "Groups prefilled for another worker.", lambda s: s.prefills),
    EngineFigure("kv_leases", _G, "Prefilled prompts kept for their readers.", lambda s: s.leases),
    EngineFigure("kv_lease_oldest_seconds", _G, "Age of the oldest of them.", lambda s: s.oldest_lease_s or 0.0),
    EngineFigure("kv_leases_expired", _C, "Leases whose readers gave no sign of life.", lambda s: s.leases_expired),
    EngineFigure("kv_transfers", _C, "Pulls that brought what their ticket said.", lambda s: s.transfers),
    EngineFigure("kv_transfer_bytes", _C, "KV bytes they brought.", lambda s: s.transfer_bytes),
    EngineFigure(
        "kv_transfer_descriptors", _C, "Pieces of memory they were read in.", lambda s: s.transfer_descriptors
    ),
    EngineFigure("kv_pulls_open", _G, "Pulls that may still write.", lambda s: s.pulls_open),
    EngineFigure("kv_blocks_pulling", _G, "KV blocks that only such a pull holds.", lambda s: s.blocks_pulling),
    EngineFigure("kv_pulls_avoided", _C, "Tickets with nothing left to pull.", lambda s: s.pulls_avoided),
    EngineFigure(
        "kv_pull_blocks_avoided", _C, "Blocks of tickets that were here already.", lambda s: s.pull_blocks_avoided
    ),
    EngineFigure(
        "recomputed_tokens", _C, "Prompt tokens computed in spite of a ticket.", lambda s: s.recomputed_tokens
    ),
)

ENGINE_COUNTS = (
    EngineCounts("kv_transfer_failures", "Pulls that brought nothing.", "kind", lambda s: s.transfer_failures),
)

ENGINE_HISTOGRAMS = (
    EngineHistogram(
        "kv_transfer_seconds",
        "From the order of a pull to its verified end.",
        SECONDS,
        lambda s: s.transfer_seconds,
        lambda s: s.transfer_seconds_sum,
    ),
)
