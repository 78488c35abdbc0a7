"""What the engine has done since it started. One object, owned by the core; parts that do the work add to it."""

from dataclasses import dataclass


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
