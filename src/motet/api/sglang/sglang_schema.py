"""The bodies of SGLang's routes, with the names of SGLang 0.5."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, PlainValidator, TypeAdapter, model_validator

from motet.api.control_bodies import Version
from motet.api.generation.answer_form import ANY_OBJECT, AnswerForm, sglang_form
from motet.api.generation.prompts import Prompt, parse_prompts
from motet.api.generation.request_fields import RequestFields, SamplingFields, Seed, StreamingFields, in_range
from motet.api.http.failure import FieldError, invalid_type, invalid_value, missing_parameter
from motet.api.http.schema import UNICODE, Neutral, Schema
from motet.session_ids import is_id
from motet.types import MAX_NAMED_LOGPROBS, Grammar, GrammarKind

DEFAULT_MAX_NEW_TOKENS = 128
ANY_JSON = "$$ANY$$"
"""SGLang's name for a `json_schema` that any JSON object fits."""
NO_PROMPT = -1
"""The `logprob_start_len` for the log-probabilities of the answer alone."""

OTHER_DATA = (
    *("return_bytes", "return_entropy", "return_flat_raw_top_logprobs", "return_hidden_states", "return_indexer_topk"),
    *("return_prompt_token_ids", "return_routed_experts", "return_sampling_mask"),
)
"""Fields that request data which Motet's answers do not have."""
MEDIA = ("audio_data", "image_data", "video_data")
"""Fields for content other than text. AReaL sends `image_data` with every prompt, empty if it has no images."""


class SglangSampling(SamplingFields):
    """SGLang's `SamplingParams`. Seeds, penalties and limits have the same meaning as on the other routes."""

    ignored = frozenset({"spaces_between_special_tokens"})  # as for every fast tokenizer
    refused = frozenset(
        {"allowed_token_ids", "bad_words", "extra_args", "beam_width", "logprob_token_ids", "structural_tag"}
    )
    aliases: ClassVar[Mapping[str, str]] = {}
    neutral: ClassVar[Neutral] = {"custom_params": ({},), "stop_regex": ([],), "stream_interval": (1,)}

    max_tokens: int | None = Field(DEFAULT_MAX_NEW_TOKENS, ge=0, alias="max_new_tokens")
    """0 only scores the prompt."""
    min_tokens: int = Field(0, ge=0, alias="min_new_tokens")
    seed: Seed | None = Field(None, alias="sampling_seed")
    include_stop_str_in_output: bool = Field(False, alias="no_stop_trim")
    regex: Annotated[str, UNICODE] | None = Field(None, min_length=1)
    ebnf: Annotated[str, UNICODE] | None = Field(None, min_length=1)
    json_schema: Annotated[str, UNICODE] | None = Field(None, min_length=1)

    @property
    def prompt_only(self) -> bool:
        return self.max_tokens == 0

    @property
    def requested_max_tokens(self) -> int | None:
        return 1 if self.prompt_only else self.max_tokens

    @property
    def form(self) -> AnswerForm | None:
        """The form of the answers. `json_schema` is JSON as a string."""
        if self.json_schema is None:
            return sglang_form(self.regex, self.ebnf)
        source = ANY_OBJECT if self.json_schema == ANY_JSON else self.json_schema
        return AnswerForm(Grammar(GrammarKind.JSON, source), "json_schema")

    @model_validator(mode="after")
    def check_one_form(self) -> Self:
        given = [name for name in ("regex", "ebnf", "json_schema") if getattr(self, name) is not None]
        if len(given) > 1:
            raise FieldError(invalid_value, given[1], f"only one of it and '{given[0]}' can be given")
        return self


_EACH_SAMPLING = TypeAdapter(list[SglangSampling])


def _sampling(value: object) -> tuple[SglangSampling, ...]:
    """Reads the parameters of all prompts, or a list with the parameters of each prompt."""
    if isinstance(value, list):
        return tuple(_EACH_SAMPLING.validate_python(value))
    return (SglangSampling.model_validate(value),)


def _rids(value: object) -> str | list[str]:
    listed = value if isinstance(value, list) else [value]
    names = [name for name in listed if isinstance(name, str)]
    if len(names) < len(listed):
        raise FieldError(invalid_type, None, "a string, or a string for each prompt")
    if not all(map(is_id, names)):
        raise FieldError(invalid_value, None, "expected up to 200 printable characters without spaces")
    if len({*names}) < len(names):
        raise FieldError(invalid_value, None, "each prompt needs a name of its own")
    return value if isinstance(value, str) else names


class Prompts(NamedTuple):
    """The prompts of a request. A list of prompts gets a list of answers, even if it has only one prompt."""

    prompts: tuple[Prompt, ...]
    listed: bool


def _texts(value: object) -> Prompts:
    prompts = parse_prompts(value)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise FieldError(invalid_type, None, "a string or an array of strings")
    return Prompts(prompts, isinstance(value, list))


def _input_ids(value: object) -> Prompts:
    prompts = parse_prompts(value)
    if any(isinstance(prompt, str) for prompt in prompts):
        raise FieldError(invalid_type, None, "an array of token ids, or an array of such arrays")
    return Prompts(prompts, isinstance(value, list) and isinstance(value[0], list))


class NamedTokens(NamedTuple):
    """The tokens that a request names: the same for all prompts, or a list for each prompt."""

    lists: tuple[tuple[int, ...], ...]
    per_prompt: bool

    def of(self, number: int) -> tuple[int, ...]:
        """Returns the tokens of the prompt with this number."""
        return self.lists[number if self.per_prompt else 0]


def _named_tokens(value: object) -> NamedTokens:
    per_prompt = isinstance(value, list) and bool(value) and all(isinstance(entry, list) for entry in value)
    lists = value if isinstance(value, list) and per_prompt else [value]
    for entry in lists:
        ids = entry if isinstance(entry, list) else [None]
        if not all(type(token) is int and 0 <= token < 2**63 for token in ids):
            raise FieldError(invalid_type, None, "an array of token ids, or an array of such arrays")
        if len(ids) > MAX_NAMED_LOGPROBS:
            raise FieldError(invalid_value, None, f"a list can have at most {MAX_NAMED_LOGPROBS} tokens")
    return NamedTokens(tuple(map(tuple, lists)), per_prompt)


class SglangRequest(RequestFields, StreamingFields):
    """The body of /generate. SGLang's other fields are refused as unknown."""

    has_token_ids = True
    ignored = frozenset(
        {"background", "conversation_id", "custom_labels", "data_parallel_rank", "external_trace_header"}
        | {"log_metrics", "no_logs", "routed_dp_rank", "routing_key"}
    )
    refused = frozenset({"kv_transfer_params", "stream_options"})
    advice: ClassVar[Mapping[str, str]] = {"priority": "its numbers mean the opposite on the other routes"}
    neutral: ClassVar[Neutral] = {
        **dict.fromkeys(OTHER_DATA, (False,)),
        **dict.fromkeys(MEDIA, ([],)),
        "modalities": ([], ["text"]),
        "priority": (0,),
        "require_reasoning": (False,),
        "routed_experts_start_len": (0,),
        "session_params": ({},),
        "use_audio_in_video": (False,),
    }

    text: Annotated[Prompts | None, PlainValidator(_texts, json_schema_input_type=str | list[str])] = None
    input_ids: Annotated[
        Prompts | None, PlainValidator(_input_ids, json_schema_input_type=list[int] | list[list[int]])
    ] = None
    sampling_params: Annotated[
        tuple[SglangSampling, ...],
        PlainValidator(_sampling, json_schema_input_type=SglangSampling | list[SglangSampling]),
    ] = Field(default_factory=lambda: _sampling({}))
    """One entry for all prompts, or an entry for each prompt."""
    return_logprob: bool = False
    logprob_start_len: int = Field(NO_PROMPT, ge=NO_PROMPT)
    """Place of the first token of the prompt that is listed. As in SGLang, it has no log-probability in the list."""
    top_logprobs_num: int = in_range("logprobs", 0)
    token_ids_logprob: Annotated[
        NamedTokens | None, PlainValidator(_named_tokens, json_schema_input_type=list[int] | list[list[int]])
    ] = None
    """Tokens whose log-probabilities are reported at each position: one list, or a list for each prompt."""
    return_text_in_logprobs: bool = False
    rid: Annotated[str | list[str] | None, PlainValidator(_rids, json_schema_input_type=str | list[str])] = None

    @property
    def given(self) -> Prompts:
        given = self.text if self.input_ids is None else self.input_ids
        assert given is not None  # `check_prompts` has checked it
        return given

    @property
    def prompt_param(self) -> str:
        return "text" if self.input_ids is None else "input_ids"

    @property
    def in_list(self) -> bool:
        """True if the answer is a list of objects, one for each choice."""
        return self.given.listed or self.n > 1

    @property
    def n(self) -> int:
        """Number of choices of each prompt."""
        return self.sampling_params[0].n

    @property
    def scores_prompt(self) -> bool:
        return self.return_logprob and self.logprob_start_len != NO_PROMPT

    @property
    def sampling(self) -> Sequence[SglangSampling]:
        """The sampling fields of all prompts or of each one, with the tokens whose log-probabilities are reported."""
        given, named = self.sampling_params, self.token_ids_logprob
        if named is None:
            return given
        number = max(len(given), len(named.lists))
        pairs = zip(cycle(given), cycle(named.lists), range(number), strict=False)
        return [sampling.model_copy(update={"logprob_token_ids": list(ids)}) for sampling, ids, _ in pairs]

    @property
    def longest_named(self) -> tuple[int, ...]:
        """The longest list of tokens whose log-probabilities are reported."""
        return () if self.token_ids_logprob is None else max(self.token_ids_logprob.lists, key=len)

    @model_validator(mode="after")
    def check_prompts(self) -> Self:
        if self.text is None and self.input_ids is None:
            raise FieldError(missing_parameter, "input_ids")
        if self.text is not None and self.input_ids is not None:
            raise FieldError(invalid_value, "text", "only one of it and 'input_ids' can be given")
        if isinstance(self.rid, list) and len(self.rid) != len(self.given.prompts):
            why = f"it has {len(self.rid)} names, and there are {len(self.given.prompts)} prompts"
            raise FieldError(invalid_value, "rid", why)
        num_given, num_prompts = len(self.sampling_params), len(self.given.prompts)
        if num_given not in (1, num_prompts):
            why = f"expected one object, or one for each of the {num_prompts} prompts, but got {num_given}"
            raise FieldError(invalid_value, "sampling_params", why)
        for number, sampling in enumerate(self.sampling_params):
            if sampling.n != self.n:
                why = f"it is {sampling.n}, but {self.n} for the first prompt; all prompts need the same value"
                raise FieldError(invalid_value, f"sampling_params[{number}].n", why)
        return self

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        for name, used in (("top_logprobs_num", self.top_logprobs_num), ("token_ids_logprob", self.longest_named)):
            if used and not self.return_logprob:
                raise FieldError(invalid_value, name, "'return_logprob' must be true when it is given")
        named = self.token_ids_logprob
        if named is not None and named.per_prompt and len(named.lists) != len(self.given.prompts):
            why = f"expected a list for each of the {len(self.given.prompts)} prompts, but got {len(named.lists)}"
            raise FieldError(invalid_value, "token_ids_logprob", why)
        return self


class SglangPause(Schema):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class SglangContinue(Schema):
    ignored = frozenset({"torch_empty_cache"})


class SglangAbort(Schema):
    """The requests to abort, by their `rid` or `x-request-id`."""

    ignored = frozenset({"aborted_message", "finished_reason"})

    rid: str = ""
    abort_all: bool = False


class SglangWeights(Schema):
    """New weights on disk. KV of other weights is never used, so `flush_cache` has no effect."""

    ignored = frozenset({"flush_cache", "token_step", "torch_empty_cache"})
    neutral: ClassVar[Neutral] = {
        "is_async": (False,),
        "keep_pause": (False,),
        "load_format": ("auto", "safetensors"),
        "recapture_cuda_graph": (False,),
    }

    model_path: Annotated[str, Field(min_length=1)]
    weight_version: Version | None = None
    abort_all_requests: bool = False
