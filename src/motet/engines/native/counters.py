"""What the engine has done since it started. One object, owned by the core; parts that do the work add to it."""

from dataclasses import dataclass, field


@dataclass
class Counters:
    """The counters of `EngineStats`, under the same names."""

    steps: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    replayed_tokens: int = 0
    preemptions: int = 0
    forks: int = 0
    blocks_shared: int = 0
    bytes_saved: int = 0
    greedy_choices_shared: int = 0
    trunk_tokens_read: int = 0
    trunk_tokens_unshared: int = 0
    prefills: int = 0
    leases_expired: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    transfer_failures: dict[str, int] = field(default_factory=dict)
    pulls_avoided: int = 0
    pull_blocks_avoided: int = 0
    recomputed_tokens: int = 0
