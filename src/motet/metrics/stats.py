"""Metrics of an engine, as shown in `/status` and `/metrics`, and their totals over several engines."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

from motet.metrics.declare import counter, counter_field, declared_in, gauge, gauge_field, histogram_field
from motet.transfer.figures import BUCKET_BOUNDS_S

STEP_TOKENS = (1.0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of the tokens of a step, vLLM's."""


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Metrics of an engine, each declared once, here (`metrics.declare`).

    The engine's core owns one instance and adds to its counters. It sends copies, with the gauges of that moment."""

    groups_running: int = gauge_field("num_groups_running", "groups", "Groups that generate tokens.", in_status=True)
    groups_waiting: int = gauge_field("num_groups_waiting", "groups", "Groups that wait for admission.")
    choices_running: int = gauge_field(
        "num_requests_running", "choices", "Choices that generate tokens.", in_vllm=True, in_status=True
    )
    choices_waiting: int = gauge_field(
        "num_requests_waiting", "choices", "Choices that wait for admission.", in_vllm=True, in_status=True
    )
    blocks_total: int = gauge_field("kv_blocks", "blocks", "KV blocks of the worker.")
    blocks_used: int = gauge_field(
        "kv_blocks_used",
        "blocks",
        "KV blocks held by groups and leases.",
        in_status=True,
        also=gauge(
            "kv_cache_usage_perc",
            "share, 0 to 1",
            "Share of the KV blocks held by groups and leases.",
            in_vllm=True,
            once_in_vllm="gpu_cache_usage_perc",
            share_of="blocks_total",
        ),
    )
    blocks_cached: int = gauge_field(
        "kv_blocks_cached", "blocks", "Free KV blocks with content that a prefix can still hit.", in_status=True
    )
    blocks_kept: int = gauge_field(
        "kv_blocks_kept", "blocks", "KV blocks that are held only for more choices of a prompt.", in_status=True
    )
    trunks_kept: int = gauge_field(
        "kv_trunks_kept", "trunks", "Prompts whose KV is kept for more choices.", in_status=True
    )
    score_bytes: int = gauge_field(
        "prompt_score_bytes", "bytes", "Memory of the log-probabilities of cached prompts.", in_status=True
    )

    steps: int = counter_field("engine_steps", "steps", "Forward passes.")
    step_tokens: tuple[int, ...] = histogram_field(
        "step_tokens",
        "tokens",
        "Tokens computed in one step: of prompts, one or more of each running choice, and drafts.",
        bounds=STEP_TOKENS,
        sum_in="step_tokens_sum",
        once_in_vllm="iteration_tokens_total",
    )
    step_tokens_sum: int = 0
    prompt_tokens: int = counter_field(
        "prompt_tokens",
        "tokens",
        "Prompt tokens of admitted groups; once per group, for any n, and again for choices that start later.",
        in_vllm=True,
        also=counter("prefix_cache_queries", "tokens", "Prompt tokens looked up in the prefix cache.", in_vllm=True),
    )
    prefill_tokens: int = counter_field(
        "prefill_tokens", "tokens", "Prompt tokens computed, not found in the prefix cache.", in_status=True
    )
    cached_tokens: int = counter_field(
        "prefix_cache_hits", "tokens", "Prompt tokens found in the prefix cache.", in_vllm=True
    )
    generated_tokens: int = counter_field(
        "generation_tokens", "tokens", "Output tokens, summed over choices.", in_vllm=True
    )
    forced_tokens: int = counter_field(
        "forced_tokens",
        "tokens",
        "Output tokens generated without logits, because a grammar allowed no others.",
        in_status=True,
    )
    draft_tokens: int = counter_field(
        "spec_decode_num_draft_tokens",
        "tokens",
        "Draft tokens that were verified, one row of a step each.",
        in_vllm=True,
        in_status=True,
    )
    accepted_tokens: int = counter_field(
        "spec_decode_num_accepted_tokens", "tokens", "Draft tokens that were accepted.", in_vllm=True, in_status=True
    )
    replayed_tokens: int = counter_field(
        "replayed_tokens", "tokens", "Output tokens computed again after a preemption or a move."
    )
    preemptions: int = counter_field(
        "num_preemptions", "choices", "Choices preempted because there were too few free blocks.", in_vllm=True
    )
    forks: int = counter_field(
        "forks", "choices", "Choices that joined an existing trunk: n - 1 for a group of n.", in_status=True
    )
    blocks_shared: int = counter_field(
        "blocks_shared", "blocks", "KV blocks that forks did not have to allocate.", in_status=True
    )
    bytes_saved: int = counter_field("bytes_saved", "bytes", "KV bytes of those blocks.")
    greedy_choices_shared: int = counter_field(
        "greedy_choices_shared", "choices", "Choices of greedy groups that share a sibling's tokens."
    )
    trunks_given_up: int = counter_field(
        "kv_trunks_given_up",
        "trunks",
        "Prompts evicted before their keep_s ended, because --keep-gb was reached or blocks ran short.",
        in_status=True,
    )
    trunk_tokens_read: int = counter_field(
        "trunk_tokens_read",
        "positions",
        "Trunk positions read by decode attention, once for choices that share a read.",
    )
    trunk_tokens_unshared: int = counter_field(
        "trunk_tokens_unshared",
        "positions",
        "Trunk positions that decode attention would have read without sharing, once per choice and step.",
    )

    prefills: int = counter_field(
        "prefills", "groups", "Groups prefilled for another worker; once per group, for any n.", in_status=True
    )
    leases: int = gauge_field("kv_leases", "leases", "Prefilled prompts held for their readers.", in_status=True)
    oldest_lease_s: float | None = gauge_field(
        "kv_lease_oldest_seconds",
        "seconds",
        "Age of the oldest lease; 0 without a lease.",
        highest=True,
        in_status=True,
        default=None,
    )
    leases_expired: int = counter_field(
        "kv_leases_expired",
        "leases",
        "Leases that expired without a heartbeat.",
        once_in_vllm="nixl_num_kv_expired_reqs",
    )
    pulls_open: int = gauge_field("kv_pulls_open", "pulls", "Pulls that can still write to KV blocks.", in_status=True)
    blocks_pulling: int = gauge_field(
        "kv_blocks_pulling",
        "blocks",
        "KV blocks held only by an open pull, because its group has ended.",
        in_status=True,
    )
    transfers: int = counter_field(
        "kv_transfers", "pulls", "Successful pulls: at most one per group, for any n.", in_status=True
    )
    transfer_bytes: int = counter_field("kv_transfer_bytes", "bytes", "KV bytes of successful pulls.", in_status=True)
    transfer_descriptors: int = counter_field(
        "kv_transfer_descriptors", "descriptors", "Memory ranges read by pulls; adjacent blocks are one range."
    )
    transfer_seconds: tuple[int, ...] = histogram_field(
        "kv_transfer_seconds",
        "seconds",
        "Time from the start of a successful pull to its verification.",
        bounds=BUCKET_BOUNDS_S,
        sum_in="transfer_seconds_sum",
        once_in_vllm="nixl_xfer_time_seconds",
    )
    transfer_seconds_sum: float = 0.0
    transfer_failures: dict[str, int] = counter_field(
        "kv_transfer_failures",
        "pulls",
        "Failed pulls, whose prompts were computed instead.",
        labels=("kind",),
        once_in_vllm="nixl_num_failed_transfers",
    )
    """Number of failures by `transfer.orders.FailureKind`."""
    pulls_avoided: int = counter_field(
        "kv_pulls_avoided", "tickets", "Tickets whose prompt was already in the prefix cache."
    )
    pull_blocks_avoided: int = counter_field(
        "kv_pull_blocks_avoided", "blocks", "Blocks of tickets that were found in the prefix cache."
    )
    recomputed_tokens: int = counter_field(
        "recomputed_tokens",
        "tokens",
        "Prompt tokens of groups with a ticket that decode computed: only the last one unless a pull failed.",
        in_status=True,
    )


EMPTY = EngineStats()
HIGHEST = frozenset(name for name, declared in declared_in(EngineStats) if declared.highest)


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Returns the metrics of several engines as one: sums, or maxima where the declaration says so."""
    return EngineStats(**{field.name: _total(field.name, stats) for field in fields(EngineStats)})


def _total(name: str, stats: Sequence[EngineStats]) -> Any:
    values = [getattr(engine, name) for engine in stats]
    if name in HIGHEST:
        return max((value for value in values if value is not None), default=None)
    match getattr(EMPTY, name):
        case dict():
            counts = Counter[str]()
            for value in values:
                counts.update(value)
            return dict(counts)
        case tuple():  # counts of a histogram's buckets; empty before the first observation
            return tuple(map(sum, zip_longest(*values, fillvalue=0)))
        case _:
            return sum(values)
