"""What passes between the parts: a request, what a step produced, facts and figures of an engine.

Everything here is frozen, knows no torch, and travels as msgspec messages unchanged. What there is one of for each
token is not tracked by the garbage collector (`gc=False`): nothing in it can point back to it.
"""

from enum import StrEnum

import msgspec

from motet.constraint import Grammar
from motet.ids import ModelName, RequestId
from motet.transfer.ticket import Ticket, TransferAddress


class Role(StrEnum):
    """What a worker does for a group."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Ingress(StrEnum):
    """Who holds the streams of clients on Ray Serve."""

    GATEWAY = "gateway"
    """Replicas of their own; a group outlives the worker that writes it."""
    DIRECT = "direct"
    """The replica that decodes: no hop for tokens, and a stream ends with its replica."""


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words. There is no abort and no error: those end the whole group."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of every choice of a group are drawn; ranges are checked where the request comes in."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: none; k: the drawn token's log-probability and the k highest."""
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    """Tokens that it does not allow cannot be drawn; end-of-sequence can be drawn only where it is complete."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class ChoiceStart(msgspec.Struct, frozen=True):
    """Where a choice begins: with nothing written, or after the tokens it wrote before (migration, preemption)."""

    index: int
    """Number of the choice inside its group."""
    seed: int
    """Unsigned 64 bits: seed of the group + index, modulo 2^64."""
    written: tuple[int, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group: one prompt and the choices to be made of it. At least one prompt token, at least one choice."""

    request_id: RequestId
    prompt: tuple[int, ...]
    choices: tuple[ChoiceStart, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    """Groups share cached prompt blocks only with groups of the same salt."""
    priority: int = 0
    """Lower goes first; equal ones in order of arrival."""
    ticket: Ticket | None = None
    """Where the KV of the prompt can be fetched; without one, or when that fails, it is computed."""
    trace: str = ""
    """The client's `x-request-id`, for log lines and for the next hop."""
    session_id: str = ""
    """The client's `x-session-id`, for the next hop."""
    straight: bool = False
    """Past prefill: it has been asked already, or is not to be. Between parts of routing; no engine is told."""
    model: ModelName = ModelName("")
    """Which of the models its workers have; empty where there is only one."""
    seeded: bool = True
    """Whether the client named the seed. If not, an engine that pays for seeds may draw as it likes."""
    stops: bool = False
    """Whether the reader may end single choices early, at a stop string say."""


def choice_starts(n: int, seed: int) -> tuple[ChoiceStart, ...]:
    """Fresh choices 0..n-1; choice i has seed + i modulo 2^64, so it equals the n=1 request with that seed."""
    return tuple(ChoiceStart(i, (seed + i) % 2**64) for i in range(n))


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one token under the model itself, before temperature and filters."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first."""


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a choice."""

    reason: FinishReason
    stop_token_id: int | None = None
    """The token of `stop_token_ids` that ended it; None for end-of-sequence."""


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one choice. The token that ends a choice is among `token_ids`."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """As long as `token_ids` when asked for."""
    finish: Finish | None = None


class PromptReport(msgspec.Struct, frozen=True, array_like=True):
    """What is known once the prompt has been read."""

    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One a prompt token, None for the first, when `prompt_logprobs` was asked for."""
    worker: str = ""
    """Who writes the choices, if there are several workers."""


class GroupDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step produced for one group, all its choices together."""

    request_id: RequestId
    choices: tuple[ChoiceDelta, ...]
    prompt: PromptReport | None = None
    """On the first delta of a group only."""


class EngineKind(StrEnum):
    """Whose engine it is. KV passes between engines of one kind only."""

    MOTET = "motet"
    VLLM = "vllm"
    OPENAI = "openai"
    """Text in, text out: no engine to us, but a worker all the same."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a worker serves beside its own: an adapter, or another name."""

    name: ModelName
    root: str = ""
    """Where it comes from, as the worker tells."""
    parent: ModelName | None = None
    """Of an adapter: what it adapts."""
    max_model_len: int


UNKNOWN_VOCABULARY = 2**31 - 1
"""`vocab_size` of an engine that does not tell; it refuses by itself what it does not know."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is; does not change while it lives."""

    model: ModelName
    max_model_len: int
    """Prompt and answer together, in tokens."""
    vocab_size: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_num_seqs: int
    role: Role
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    fingerprint: str
    """Equal fingerprints: equal tokens for equal requests (when it ends in `-same`)."""
    pid: int | None = None
    """Only for a process on this machine."""
    transfer: TransferAddress | None = None
    """Where its KV can be fetched, or who fetches; None for an engine that keeps its KV to itself."""
    kind: EngineKind = EngineKind.MOTET
    ticket_readers: int = 64
    """How many readers a ticket of its may have."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an engine at one moment. The counters only grow while the engine lives."""

    groups_running: int = 0
    groups_waiting: int = 0
    choices_running: int = 0
    choices_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    """Held by groups; free blocks that are still cached are not among them."""
    blocks_cached: int = 0
    """Free blocks whose content may still be found by its prefix."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all admitted groups."""
    prefill_tokens: int = 0
    """Prompt tokens computed: `prompt_tokens` less the cached ones, plus those computed again."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    replayed_tokens: int = 0
    """Written tokens computed again after a preemption or a resume."""
    preemptions: int = 0
    forks: int = 0
    """Choices that joined a trunk already there: n - 1 for a group of n."""
    blocks_shared: int = 0
    """Blocks that forks did not have to allocate."""
    bytes_saved: int = 0
    """KV bytes of those blocks."""
    greedy_choices_shared: int = 0
    """Choices of greedy groups that were answered by a sibling's tokens."""
    trunk_tokens_read: int = 0
    """Trunk positions that decode attention read, once a group and step."""
    trunk_tokens_unshared: int = 0
    """What it would have read without sharing: once a choice and step."""

    prefills: int = 0
    """Groups prefilled for another worker: leases granted."""
    leases: int = 0
    """Trunks kept for readers at this moment."""
    oldest_lease_s: float | None = None
    leases_expired: int = 0
    """Leases whose readers gave no sign of life."""
    pulls_open: int = 0
    """Pulls that may still write at this moment."""
    blocks_pulling: int = 0
    """Blocks that such a pull alone holds: its group is gone."""
    transfers: int = 0
    """Pulls that brought what their ticket said."""
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    """Contiguous pieces of memory they were read in."""
    transfer_seconds: tuple[int, ...] = ()
    """How many pulls took so long: one count for each bound of `transfer.figures.SECONDS`, one for longer ones."""
    transfer_seconds_sum: float = 0.0
    transfer_failures: dict[str, int] = {}
    """By kind of `transfer.base.FailureKind`."""
    pulls_avoided: int = 0
    """Tickets whose prompt was in the prefix cache already."""
    pull_blocks_avoided: int = 0
    """Blocks of tickets that were found in the prefix cache."""
    recomputed_tokens: int = 0
    """Prompt tokens of groups with a ticket that were computed here all the same: the last one when all goes well."""
