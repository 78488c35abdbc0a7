"""The objects that pass between the parts: requests, results of steps, facts about engines.

Everything here is frozen, needs no torch, and travels unchanged as msgspec messages. Objects that
are made for each token are not tracked by the garbage collector (`gc=False`), since nothing in them points back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import msgspec

from motet.ids import ModelName, RequestId
from motet.tracing.context import TraceContext
from motet.transfer.ticket import Ticket, TransferAddress


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON array of the allowed strings."""
    LARK = "lark"
    """Lark as llguidance reads it, with `%json` and `<special>`."""


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tags that a model writes around its thoughts before it answers."""

    open: str
    close: str
    opened: bool
    """True if the prompt already ends with the opening tag."""
    before_answer: str = ""
    """Text before every answer, with or without thoughts."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that every choice of a group must have, from its first token to the end, as the client wrote it, with
    the objects of schemas closed. Whoever uses it compiles it."""

    kind: GrammarKind
    source: str
    thinking: Thinking | None = None
    """Thoughts that may come before the text that the grammar describes."""

    @property
    def request_field(self) -> dict[str, object]:
        """The grammar as the value of the request field `structured_outputs`, which cannot express thoughts."""
        match self.kind:
            case GrammarKind.CHOICE:
                return {"choice": msgspec.Raw(self.source.encode())}
            case GrammarKind.LARK:
                return {"grammar": self.source}
            case GrammarKind.JSON | GrammarKind.REGEX:
                return {self.kind.value: self.source}


class LogprobsMode(StrEnum):
    """The distribution that the log-probabilities of drawn tokens are of, in vLLM's words."""

    RAW = "raw_logprobs"
    """The model's own, before anything is done to it."""
    PROCESSED = "processed_logprobs"
    """The one from which the token was drawn: after bias, penalties, temperature and filters."""


class Role(StrEnum):
    """The role of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Ingress(StrEnum):
    """The replicas that hold the streams of clients on Ray Serve."""

    GATEWAY = "gateway"
    """Replicas of their own; a group outlives the worker that writes it."""
    DIRECT = "direct"
    """The decode replica: tokens have one hop less, and a stream ends with its replica."""


class Policy(StrEnum):
    """The rule that chooses among workers with room."""

    KV = "kv"
    """The least cost (`routing.cost`) of computing the prompt and of the open choices."""
    LEAST_LOADED = "least-loaded"
    """The fewest open choices, then the fewest blocks; for prefill the fewest tokens queued first."""
    ROUND_ROBIN = "round-robin"
    SESSION = "session"
    """The session's last worker, if there is one, else the least loaded."""


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words. An error ends the whole group, so it is not here."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    ABORT = "abort"
    """An operator has ended it; what it has written stands. The word is vLLM's."""


class PauseMode(StrEnum):
    """What becomes of the groups under way when a server is paused, in vLLM's words."""

    ABORT = "abort"
    """They end where they are, as do those that wait."""
    WAIT = "wait"
    """They end by themselves before the pause begins."""
    KEEP = "keep"
    """They stop between two steps, keep all they have, and go on later."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a group. The prompt is counted once, however many choices are made of it."""

    prompt_tokens: int
    completion_tokens: int
    """The sum over the choices; tokens whose text a stop string cut off are counted, they were made."""
    cached_tokens: int | None = 0
    """Prompt tokens whose KV was in the prefix cache; None if a text upstream did not tell."""
    reasoning_tokens: int | None = 0
    """Completion tokens that are thoughts, summed over the choices; None if a text upstream did not tell."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        """Adds up groups, or parts of one. What one of them does not tell is not known of both."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return Usage(**dict(zip(self.__struct_fields__, sums, strict=True)))


@dataclass(frozen=True)
class SamplingField:
    """The range of a field of `SamplingParams`. The HTTP schemas (`api.generation.schema`) and the worker's routes
    (`api.worker.engine_routes`) refuse other values."""

    low: float | None = None
    """None: the values have no order, as for a bool."""
    high: float | None = None
    above_low: bool = False
    """True if `low` itself is not allowed."""
    verbatim: bool = True
    """True if requests have a field of this name, type, default and range whose value goes to the engine unchanged; the
    schemas then take it from here. False if the request's field differs, or its value must be computed."""

    @property
    def words(self) -> str:
        return f"above {self.low:g}, up to {self.high:g}" if self.above_low else f"{self.low:g} to {self.high:g}"

    def allows(self, value: float) -> bool:
        """Returns True if the value is in the range; False also for NaN."""
        low, high = self.low, self.high
        return low is None or high is None or (low <= value <= high and not (self.above_low and value == low))


MAX_NAMED_LOGPROBS = 128
"""Most `logprob_token_ids`, as in vLLM."""
MAX_LOGPROBS = 1000
"""Most log-probabilities of other tokens for each token that a server may allow; `max_logprobs` is what it does."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of every choice of a group are drawn. Each field is declared once, here: its range, and if
    requests have it unchanged. vLLM workers get every field under the same name (`engines.vllm.requests`)."""

    max_tokens: int
    temperature: Annotated[float, SamplingField(0, 2)] = 1.0
    """0 means greedy."""
    top_p: Annotated[float, SamplingField(0, 1, above_low=True)] = 1.0
    top_k: Annotated[int, SamplingField(0, 2**31, verbatim=False)] = 0
    """0 means off."""
    min_p: Annotated[float, SamplingField(0, 1)] = 0.0
    presence_penalty: Annotated[float, SamplingField(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, SamplingField(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, SamplingField(0, 2, above_low=True)] = 1.0
    logit_bias: Annotated[dict[int, float], SamplingField(-100, 100, verbatim=False)] = {}
    """Token id -> the number that is added to its logit; the range is for these numbers."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that can be drawn; empty: all. If all of them end a choice, they win over `min_tokens`."""
    min_tokens: int = 0
    ignore_eos: Annotated[bool, SamplingField()] = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: Annotated[int | None, SamplingField(0, MAX_LOGPROBS, verbatim=False)] = None
    """k: the log-probability of the drawn token and the k highest; None: no log-probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities are told beside the drawn one's, in place of the highest; only with `logprobs`."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    """Those of prompts are always raw."""
    prompt_logprobs: Annotated[int | None, SamplingField(0, MAX_LOGPROBS, verbatim=False)] = None
    grammar: Grammar | None = None
    """Only tokens that it allows can be drawn, and end-of-sequence only where it is complete."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


SAMPLING_FIELDS: Mapping[str, SamplingField] = {
    name: metadata
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for metadata in getattr(hint, "__metadata__", ())
    if isinstance(metadata, SamplingField)
}

VERBATIM_FIELDS = tuple(name for name, field in SAMPLING_FIELDS.items() if field.verbatim)
"""The fields that requests have unchanged."""


class ChoiceStart(msgspec.Struct, frozen=True):
    """The start of a choice: without output tokens, or after those that it had before (migration, preemption)."""

    index: int
    seed: int
    """Unsigned 64 bits: seed of the group + index, modulo 2^64."""
    output_tokens: tuple[int, ...] = msgspec.field(default=(), name="written")
    """Tokens that were generated before."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group: one prompt and its choices. There is at least one prompt token and one choice."""

    request_id: RequestId
    prompt: tuple[int, ...]
    choices: tuple[ChoiceStart, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    """Groups share cached prompt blocks only with groups that have the same salt."""
    keep_s: float = 0.0
    """Seconds for which the engine keeps the prompt's KV after the group, unless it needs the room."""
    priority: int = 0
    """Lower goes first; equal ones in order of arrival."""
    ticket: Ticket | None = None
    """With it the prompt's KV can be fetched; without it, or if that fails, the KV is computed."""
    trace: str = ""
    """The client's `x-request-id`, for log lines and for the next hop."""
    traceparent: TraceContext | None = None
    """The span that this work is a part of, for spans of it and for the next hop; None if there is none."""
    session_id: str = ""
    """The client's `x-session-id`, for the next hop."""
    model: ModelName = ModelName("")
    """The name of the model; empty if there is only one."""
    seeded: bool = True
    """True if the client set the seed. If not, an engine that is slower with seeds may ignore it."""
    stops: bool = False
    """True if the reader may end single choices early, for instance at a stop string."""
    model_digest: str = ""
    """The `model_digest` of the engine that began its choices: only an engine with the same one, or with none, may go
    on with them. Empty: any engine may."""


def choice_starts(n: int, seed: int) -> tuple[ChoiceStart, ...]:
    """Returns new choices 0..n-1. Choice i has seed + i modulo 2^64, so it equals the n=1 request with that seed."""
    return tuple(ChoiceStart(i, (seed + i) % 2**64) for i in range(n))


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one token, as `logprobs_mode` says; of a prompt's token always under the model itself."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first. With `logprob_token_ids`: of the drawn token and then
    of these, in their order, each once."""


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a choice."""

    reason: FinishReason
    stop_token_id: int | None = None
    """The token of `stop_token_ids` that ended it; None for end-of-sequence."""


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that one step added to one choice, with the token that ends it."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """If requested, one for each of `token_ids`."""
    finish: Finish | None = None


class PullReport(msgspec.Struct, frozen=True, array_like=True):
    """How the KV of a prompt came from another worker, or did not."""

    start_ns: int
    """Unix time, by the clock of the worker that fetched it."""
    end_ns: int
    num_bytes: int
    failure: str = ""
    """Why it did not come, so that the worker computed the prompt; empty if it did."""


class PromptReport(msgspec.Struct, frozen=True, array_like=True):
    """An engine's report after it has read the prompt."""

    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    """If `prompt_logprobs` was requested, one for each prompt token, None for the first."""
    pull: PullReport | None = None
    """Set if the KV was fetched, for traces; engines need not tell it."""


class GroupDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The results of one step for one group, all its choices together."""

    request_id: RequestId
    choices: tuple[ChoiceDelta, ...]
    prompt: PromptReport | None = None
    """On the first delta of a group only."""
    worker: str = ""
    """The worker that writes these choices: on its first delta, and on all deltas of a group that is on several workers
    or has moved. Empty on others, and where a server does not route."""
    weight_version: str = ""
    """The version of the weights that write from now on, on their first delta; empty for those of the start."""


class EngineKind(StrEnum):
    """The software of an engine. KV passes only between engines of the same kind."""

    MOTET = "motet"
    VLLM = "vllm"
    OPENAI = "openai"
    """It takes texts and not tokens, so it is a worker but no `Engine`."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a worker serves beside its own: an adapter, or another name."""

    name: ModelName
    root: str = ""
    parent: ModelName | None = None
    max_model_len: int


UNKNOWN_VOCABULARY = 2**31 - 1
"""`vocab_size` of an engine that does not report it; it refuses unknown tokens itself."""


FIRST_VERSION = "0"  # of the weights with which an engine is started


class WeightSpan(msgspec.Struct, frozen=True):
    """Consecutive output tokens [start, end) of a choice that weights of one version have written."""

    version: str
    start: int
    end: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine, which only new weights change. Some kinds do not report fields with a default."""

    model: ModelName
    max_model_len: int
    """Prompt and answer together, in tokens."""
    vocab_size: int = UNKNOWN_VOCABULARY
    block_size: int
    num_blocks: int
    bytes_per_block: int = 0
    max_num_seqs: int
    role: Role
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    fingerprint: str = ""
    """Engines with equal fingerprints that end in `-same` write equal tokens for equal requests."""
    model_digest: str = ""
    """Digest of the model's configuration and weights, on any hardware. Empty if the engine does not report it."""
    weight_version: str = FIRST_VERSION
    """The name that whoever brought the weights gave them; "0" for those it was started with."""
    block_weights: str = ""
    """Names the weights in the names of its blocks (`block_names`); empty for those it was started with."""
    pid: int | None = None
    """Set only for a process on this machine."""
    transfer: TransferAddress | None = None
    """The address of its side channel; None for an engine that keeps its KV to itself."""
    kind: EngineKind = EngineKind.MOTET
    shares_prompts: bool = False
    """True if groups share a prompt that it is still computing for the first of them."""
    ticket_readers: int = 64
