"""The objects that pass between the parts: requests and results of steps.

Everything here is frozen, does not need torch, and travels unchanged as msgspec messages. The garbage collector does
not track objects that are made for each token (`gc=False`): they cannot be part of a reference cycle."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Literal, Self, get_type_hints, overload

import msgspec

from motet.ids import ModelName, RequestId
from motet.tracing.context import TraceContext
from motet.transfer.ticket import Ticket


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON array of the allowed strings."""
    LARK = "lark"
    """Lark as llguidance reads it, with `%json` and `<special>`."""


class ThinkingBudget(msgspec.Struct, frozen=True):
    """The maximum length of reasoning. The closing tag follows then."""

    max_tokens: int
    open_id: int
    close_id: int
    """The tags, which are one token each."""


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tags around the reasoning that a model generates before its answer."""

    open: str
    close: str
    opened: bool
    """True if the prompt already ends with the opening tag."""
    before_answer: str = ""
    """Text before every answer, with or without reasoning."""
    budget: ThinkingBudget | None = None
    """None for reasoning of any length."""


ANY_ANSWER = "start: <[*]>*"
"""Source of the grammar of answers that can be any text, after reasoning with a budget."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of every choice of a group, from its first token to the end: the client's source, with the objects of
    schemas closed. The API and the engine compile it, each for itself."""

    kind: GrammarKind
    source: str
    thinking: Thinking | None = None
    """Tags of the reasoning that can precede the text described by the grammar."""

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
    """The distribution to which the log-probabilities of output tokens belong, under vLLM's names."""

    RAW = "raw_logprobs"
    """The distribution of the model, before bias, penalties, temperature and filters."""
    PROCESSED = "processed_logprobs"
    """The distribution from which the token was sampled: after bias, penalties, temperature and filters."""


class Role(StrEnum):
    """The role of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class FinishReason(StrEnum):
    """Why a choice ended, under OpenAI's names. An error ends the group, not a choice, so it is not listed."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    ABORT = "abort"
    """The client, an operator or a policy ended the choice; its output so far is kept. The name is vLLM's."""


class PauseMode(StrEnum):
    """What happens to unfinished groups when a server is paused, under vLLM's names."""

    ABORT = "abort"
    """Running and waiting groups end with the output they have."""
    WAIT = "wait"
    """Running groups finish before the pause starts."""
    KEEP = "keep"
    """Running groups stop between two steps, keep their state, and continue after the pause."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a group. The prompt is counted once, for any n."""

    prompt_tokens: int
    completion_tokens: int
    """Sum over the choices, including tokens whose text was cut off at a stop string."""
    cached_tokens: int | None = 0
    """Prompt tokens whose KV was in the prefix cache; None if a text upstream did not report them."""
    reasoning_tokens: int | None = 0
    """Completion tokens of reasoning, summed over the choices; None if a text upstream did not report them."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        """Returns the sum for two groups, or two parts of one. A count that one of them lacks is None."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return Usage(**dict(zip(self.__struct_fields__, sums, strict=True)))


@dataclass(frozen=True)
class SamplingField:
    """The range of a field of `SamplingParams`. The HTTP schemas (`api.generation.request_fields`) and the routes for
    gateways (`api.worker.engine_routes`) refuse other values."""

    low: float | None = None
    """Lower bound; None if the values have no order, as for a bool."""
    high: float | None = None
    """Upper bound, inclusive."""
    above_low: bool = False
    """True if `low` itself is not allowed."""
    verbatim: bool = True
    """True if requests have a field of this name, type, default and range whose value goes to the engine unchanged; the
    schemas then take it from here. False if the request's field differs, or its value must be computed."""
    edits_logits: bool = False
    """True if the native sampler changes logits for it, in `sample.edits`."""
    generation_config: str = ""
    """Name in a model's `generation_config.json`, whose value is the default of requests; empty if it has none."""

    @property
    def words(self) -> str:
        return f"above {self.low:g}, up to {self.high:g}" if self.above_low else f"{self.low:g} to {self.high:g}"

    def allows(self, value: float) -> bool:
        """Returns True if the value is in the range. NaN is in no range."""
        low, high = self.low, self.high
        return low is None or high is None or (low <= value <= high and not (self.above_low and value == low))


MAX_NAMED_LOGPROBS = 128
"""Maximum number of `logprob_token_ids`, as in vLLM."""
MAX_LOGPROBS = 1000
"""Maximum value of a server's setting `max_logprobs`: alternatives reported for each token."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of every choice of a group are sampled. Each field is declared once, here, with its range and with
    whether requests have it unchanged. vLLM workers get every field under the same name (`engines.vllm.requests`)."""

    max_tokens: Annotated[int, SamplingField(1, 2**31, verbatim=False, generation_config="max_new_tokens")]
    temperature: Annotated[float, SamplingField(0, 2, generation_config="temperature")] = 1.0
    """0 means greedy."""
    top_p: Annotated[float, SamplingField(0, 1, above_low=True, generation_config="top_p")] = 1.0
    top_k: Annotated[int, SamplingField(0, 2**31, verbatim=False, generation_config="top_k")] = 0
    """0 means off."""
    min_p: Annotated[float, SamplingField(0, 1, generation_config="min_p")] = 0.0
    presence_penalty: Annotated[float, SamplingField(-2, 2, edits_logits=True)] = 0.0
    frequency_penalty: Annotated[float, SamplingField(-2, 2, edits_logits=True)] = 0.0
    repetition_penalty: Annotated[
        float, SamplingField(0.01, 2, edits_logits=True, generation_config="repetition_penalty")
    ] = 1.0
    """Numbers near 0 would make logits infinite."""
    logit_bias: Annotated[dict[int, float], SamplingField(-100, 100, verbatim=False, edits_logits=True)] = {}
    """Number added to the logit of each of these tokens; the range applies to the numbers."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that can be sampled; empty if all can. If each of them ends a choice, `min_tokens` is ignored."""
    min_tokens: int = 0
    ignore_eos: Annotated[bool, SamplingField()] = False
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    """Texts that must not be generated, as the client sent them, for engines that take texts."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """The same as tokens. The last token of a sequence is not sampled after the others."""
    extra_args: str = ""
    """Arguments for third-party extensions of vLLM workers, a JSON object; empty if there are none."""
    logprobs: Annotated[int | None, SamplingField(0, MAX_LOGPROBS, verbatim=False)] = None
    """Number of likely tokens whose log-probabilities are reported with the sampled token's; None for no report."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens to report in addition to the most likely ones; only with `logprobs`."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    """Distribution of the output tokens' log-probabilities; the prompt's are always raw."""
    prompt_logprobs: Annotated[int | None, SamplingField(0, MAX_LOGPROBS, verbatim=False)] = None
    prompt_logprob_token_ids: tuple[int, ...] = ()
    """Tokens to report at each position of the prompt, as `logprob_token_ids`; only with `prompt_logprobs`."""
    grammar: Grammar | None = None
    """Allows only its tokens to be sampled, and end-of-sequence only where the text is complete."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """True if a field that is declared with `edits_logits` has another value than its default."""
        return any(getattr(self, name) != default for name, default in _EDITS)


SAMPLING_FIELDS: Mapping[str, SamplingField] = {
    name: metadata
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for metadata in getattr(hint, "__metadata__", ())
    if isinstance(metadata, SamplingField)
}

VERBATIM_FIELDS = tuple(name for name, field in SAMPLING_FIELDS.items() if field.verbatim)
"""Fields that requests have unchanged."""

_DEFAULTS = SamplingParams(max_tokens=1)
_EDITS = tuple((name, getattr(_DEFAULTS, name)) for name, field in SAMPLING_FIELDS.items() if field.edits_logits)


class ChoiceStart(msgspec.Struct, frozen=True):
    """The start of a choice: without output tokens, or after the tokens that it had before a migration."""

    index: int
    seed: int
    """Seed of the group + index, modulo 2^64."""
    output_tokens: tuple[int, ...] = msgspec.field(default=(), name="written")
    """Tokens that were generated before."""


BACKGROUND_PRIORITY = 2**63 - 1
"""`GenerateRequest.priority` of the lines of batches, the highest value: everything else runs before."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group: one prompt and its choices. It has at least one prompt token and one choice."""

    request_id: RequestId
    prompt: tuple[int, ...]
    choices: tuple[ChoiceStart, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    """Groups share cached prompt blocks only with groups that have the same salt."""
    keep_s: float = 0.0
    """Seconds for which the engine keeps the prompt's KV after the group, unless it needs the blocks."""
    priority: int = 0
    """Lower values run first. Groups of equal priority take turns by client."""
    client: str = ""
    """Id of the client, for fair shares: the same on all servers for one API key, which it does not reveal."""
    client_weight: float = 1.0
    """Weight of the client: a client with twice the weight of another is entitled to twice as much of an engine."""
    ticket: Ticket | None = None
    """Ticket with which the prompt's KV can be fetched. Without one, or if the pull fails, the engine computes it."""
    trace: str = ""
    """The client's `x-request-id`, for log lines and for the next hop."""
    traceparent: TraceContext | None = None
    """Parent span of this work, also for the next hop; None if there is none."""
    session_id: str = ""
    """Id of the client's session, for routing and for the next hop."""
    model: ModelName = ModelName("")
    """Name of the model; empty if the engine has only one."""
    unset_fields: tuple[str, ...] = ()
    """Fields of `sampling` that are neutral because neither the client nor a known default sets them. A vLLM server
    uses its own defaults for them."""
    seeded: bool = True
    """True if the client set the seed. If not, an engine that is slower with seeds may ignore it."""
    stops: bool = False
    """True if the reader can end single choices early, for instance at a stop string."""
    model_digest: str = ""
    """Only an engine with this `model_digest`, or with none, may continue the choices. Empty if any engine may."""
    scored_from: int = 0
    """Place of the first prompt token whose log-probability is needed, with `prompt_logprobs`; at most the number of
    prompt tokens. An engine can report the log-probabilities of earlier tokens as well."""


def choice_starts(n: int, seed: int) -> tuple[ChoiceStart, ...]:
    """Returns choices 0 to n - 1. Choice i has seed + i modulo 2^64, so it equals the n = 1 request with that seed."""
    return tuple(ChoiceStart(i, (seed + i) % 2**64) for i in range(n))


def starts_by_output(starts: Sequence[ChoiceStart]) -> list[list[ChoiceStart]]:
    """Returns lists of choices with equal output tokens: in a greedy group, they get equal answers."""
    by_output: dict[tuple[int, ...], list[ChoiceStart]] = {}
    for start in starts:
        by_output.setdefault(start.output_tokens, []).append(start)
    return list(by_output.values())


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one token in the distribution of `logprobs_mode`; for prompt tokens it is always raw."""

    token_id: int
    logprob: float
    rank: int
    """Rank of the token; 1 for the most likely one."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first. With `logprob_token_ids` then of the token itself and
    of these tokens in their order, each once."""


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a choice."""

    reason: FinishReason
    stop_token_id: int | None = None
    """Token of `stop_token_ids` that ended the choice; None for end-of-sequence."""
    worker_reason: Literal["repetition", "parse_error"] | None = None
    """A third-party worker's reason, if OpenAI has none such; the last token then belongs to the text."""


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that one step added to one choice, including the token that ends it."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `token_ids`; None if not requested."""
    finish: Finish | None = None

    def single_tokens(self) -> Iterator["ChoiceDelta"]:
        """Yields a delta for each token. The end of the choice is in the last one, or in a delta without a token."""
        last = len(self.token_ids) - 1
        if last <= 0:
            if self.token_ids or self.finish is not None:
                yield self
            return
        for place, token_id in enumerate(self.token_ids):
            logprobs = None if self.logprobs is None else self.logprobs[place : place + 1]
            yield ChoiceDelta(self.index, (token_id,), logprobs, self.finish if place == last else None)


class PullReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of a pull: the fetch of a prompt's KV from another worker."""

    start_ns: int
    """Unix time in nanoseconds, by the clock of the worker that fetched the KV."""
    end_ns: int
    num_bytes: int
    failure: str = ""
    """Reason why the pull failed and the worker computed the prompt; empty if it succeeded."""


Score = TokenLogprob | None
"""Log-probability of a prompt token; None for the first token of a prompt."""
SCORES_PER_PART = 32
ARRAY_16 = b"\xdc"
"""First byte of an array in msgpack whose number of elements is in the next two bytes."""
_SCORES: msgspec.msgpack.Decoder[tuple[Score, ...]] = msgspec.msgpack.Decoder(tuple[Score, ...])


EncodedScore = bytes
"""A `Score` in msgpack."""


def score_parts(scores: Iterable[EncodedScore]) -> Iterator[bytes]:
    """Yields the parts of a prompt's scores: arrays of msgpack with at most `SCORES_PER_PART` scores."""
    left = iter(scores)
    while part := [*islice(left, SCORES_PER_PART)]:
        yield ARRAY_16 + len(part).to_bytes(2, "big") + b"".join(part)


class PromptScores(Sequence[Score]):
    """The scores of a prompt, in encoded parts of `SCORES_PER_PART` tokens. A part is decoded when it is read: 8,000
    tokens with 20 alternatives each are 330,000 numbers, which would take 40 to 100 ms."""

    def __init__(self, parts: Sequence[bytes], *, first: int = 0) -> None:
        """`first`: number of scores at the start of the parts that are left out."""
        self._parts = parts
        self._first = first

    def __len__(self) -> int:
        if not self._parts:
            return 0
        last = self._parts[-1]  # its first bytes are the number of its scores, so it need not be decoded
        num_last = int.from_bytes(last[1:3], "big") if last[:1] == ARRAY_16 else len(_SCORES.decode(last))
        return max(0, SCORES_PER_PART * (len(self._parts) - 1) + num_last - self._first)

    def __iter__(self) -> Iterator[Score]:
        """Yields all scores. Raises `msgspec.MsgspecError` for parts that cannot be decoded."""
        left_out = self._first
        for part in self._parts:
            yield from _SCORES.decode(part)[left_out:]
            left_out = 0

    @overload
    def __getitem__(self, place: int) -> Score: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Score, ...]: ...

    def __getitem__(self, place: int | slice) -> Score | tuple[Score, ...]:
        if isinstance(place, int):
            place = range(len(self))[place]
            return self[place : place + 1][0]
        first, stop, step = place.indices(len(self))
        first, stop = first + self._first, stop + self._first
        part = first // SCORES_PER_PART
        read = [score for raw in self._parts[part : -(-stop // SCORES_PER_PART)] for score in _SCORES.decode(raw)]
        return tuple(read[first - part * SCORES_PER_PART : stop - part * SCORES_PER_PART : step])

    def since(self, position: int) -> "PromptScores":
        """Returns the scores from a position on, without the parts before it."""
        part, first = divmod(self._first + position, SCORES_PER_PART)
        return PromptScores(self._parts[part:], first=first)


class PromptReport(msgspec.Struct, frozen=True, array_like=True):
    """An engine's report after it has computed the prompt."""

    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""
    parts: tuple[bytes, ...] | None = None
    """The parts of `logprobs`."""
    pull: PullReport | None = None
    """Result of the pull, for traces; None if there was none, or if the engine does not report it."""
    prefill_worker: str = ""
    """Id of the worker that computed the prompt for another one. Set by routing."""
    queue_s: float = 0.0
    """Time for which the group waited for capacity on a worker. Set by routing."""
    scored_from: int = 0
    """Place of the prompt token to which the first of `logprobs` belongs; at most the request's `scored_from`."""

    @classmethod
    def scored(cls, cached_tokens: int, scores: Iterable[Score] | None, *, scored_from: int = 0) -> Self:
        """`scores`: one for each prompt token from `scored_from` on; None if `prompt_logprobs` was not requested."""
        encoded = None if scores is None else map(msgspec.msgpack.encode, scores)
        parts = None if encoded is None else tuple(score_parts(encoded))
        return cls(cached_tokens, parts, scored_from=scored_from)

    @property
    def logprobs(self) -> PromptScores | None:
        """One score for each prompt token from `scored_from` on; None if `prompt_logprobs` was not requested."""
        return None if self.parts is None else PromptScores(self.parts)

    def scores_since(self, place: int) -> PromptScores:
        """Returns the scores of the prompt tokens from a place on, which is at least `scored_from`."""
        return PromptScores(self.parts or ()).since(place - self.scored_from)


class GroupDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The results of one step for one group, all its choices together."""

    request_id: RequestId
    choices: tuple[ChoiceDelta, ...]
    prompt: PromptReport | None = None
    """Set on the first delta of a group only."""
    worker: str = ""
    """Id of the worker that generates these choices: on its first delta, and on all deltas of a group that runs on
    several workers or has moved. Empty on other deltas, and on a server without routing."""
    weight_version: str = ""
    """Version of the weights from this delta on, set on their first delta; empty for the initial weights."""
