"""The counters of a fake vLLM server, and its `/metrics`."""

import time
from dataclasses import dataclass, field

from tests.peers.vllm_requests import VLLMRequest
from tests.peers.vllm_tokens import state_of


@dataclass
class VLLMCounters:
    """Counts since the last start, except `open`, which a restart does not reset."""

    model: str
    block_size: int
    num_blocks: int
    open: int = 0
    finished: int = 0
    aborted: int = 0
    """Requests whose connection was closed."""
    generated_tokens: int = 0
    transfers: int = 0
    local_compute: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    started_s: float = 0.0
    _cached: set[int] = field(default_factory=set)
    """The states (`state_of`) at the ends of all full blocks in the prefix cache."""
    _held: int = 0

    def reset(self) -> None:
        """Starts the counts again, as a new process does."""
        self.started_s = max(time.time(), self.started_s + 0.01)
        self.finished = self.aborted = self.generated_tokens = self.transfers = 0
        self.local_compute = self.local_cache_hit = self.external_kv_transfer = 0
        self._cached.clear()

    def arrived(self, request: VLLMRequest) -> None:
        self.open += 1
        self._held += self._blocks(request)

    def left(self, request: VLLMRequest) -> None:
        self.open -= 1
        self._held -= self._blocks(request)

    def computed(self, request: VLLMRequest) -> None:
        """Counts the prompt tokens of each choice by their source."""
        for _ in range(request.sampling.n):
            cached = self._take_cached(request.prompt)
            self.local_cache_hit += cached
            if request.reads_ticket:
                self.external_kv_transfer += len(request.prompt) - cached
            else:
                self.local_compute += len(request.prompt) - cached

    def text(self, *, pinned_blocks: int, reports_blocks: bool = True) -> str:
        label = f'engine="0",model_name="{self.model}"'
        usage = (self._held + pinned_blocks) / self.num_blocks
        prompt_tokens = self.local_compute + self.local_cache_hit + self.external_kv_transfer
        plain = {
            "num_requests_running": self.open,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": usage,
            "prompt_tokens_total": prompt_tokens,
            "generation_tokens_total": self.generated_tokens,
            "num_preemptions_total": 0,
            "nixl_xfer_time_seconds_count": self.transfers,
            "nixl_bytes_transferred_sum": self.external_kv_transfer * 1000,
            "nixl_num_failed_transfers_total": 0,
            "nixl_num_kv_expired_reqs_total": 0,
        }
        sources = {
            "local_compute": self.local_compute,
            "local_cache_hit": self.local_cache_hit,
            "external_kv_transfer": self.external_kv_transfer,
        }
        size, number = (self.block_size, self.num_blocks) if reports_blocks else (None, None)
        config = f'block_size="{size}",cache_dtype="auto",engine="0",num_gpu_blocks="{number}"'
        lines = [
            f"process_start_time_seconds {self.started_s}",
            f"vllm:cache_config_info{{{config}}} 1.0",
            *(f"vllm:{name}{{{label}}} {float(value)}" for name, value in plain.items()),
            *(
                f'vllm:prompt_tokens_by_source_total{{{label},source="{source}"}} {float(tokens)}'
                for source, tokens in sources.items()
            ),
        ]
        return "\n".join(lines) + "\n"

    def _take_cached(self, prompt: list[int]) -> int:
        """Returns the number of prompt tokens in leading cached blocks, and caches all full blocks. The last token of a
        prompt never counts as cached."""
        states, state = [], 0
        for end in range(self.block_size, len(prompt) + 1, self.block_size):
            state = state_of(prompt[end - self.block_size : end], state)
            states.append(state)
        hits = next((i for i, state in enumerate(states) if state not in self._cached), len(states))
        self._cached.update(states)
        return min(hits * self.block_size, (len(prompt) - 1) // self.block_size * self.block_size)

    def _blocks(self, request: VLLMRequest) -> int:
        return -(-len(request.prompt) // self.block_size)
