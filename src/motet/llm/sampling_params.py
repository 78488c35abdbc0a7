"""The parameters of sampling: `SamplingParams` and `StructuredOutputsParams`, with the names and the defaults of vLLM.

A wrong type or value is refused when it is set, before anything is sent. What depends on the server, such as its
maximum of `n`, is refused by the server. Both raise `motet.errors.RequestError`, whose `param` names the field."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Final, Literal, TypeGuard

from motet.errors import RequestError
from motet.types import SAMPLING_FIELDS

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_KEEP_S: Final = 3600.0
SEEDS_APART: Final = 2**20
"""Distance between the seeds of two prompts: more than a prompt has choices."""


class RequestOutputKind(IntEnum):
    """The content of the steps of `AsyncLLM.stream`, under vLLM's names."""

    CUMULATIVE = 0
    """Each step has everything that was generated so far."""
    DELTA = 1
    """Each step has what is new, and only the choices that have something new."""
    FINAL_ONLY = 2
    """There is one step, at the end."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of each answer, enforced by a grammar. Exactly one of the first five fields must be given.

    >>> SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"])).structured_outputs.choice
    ['yes', 'no']
    """

    json: str | Mapping[str, object] | None = None
    """A JSON Schema, as an object or as a text."""
    regex: str | None = None
    """A regular expression in Rust's syntax for the complete text."""
    choice: Sequence[str] | None = None
    """The allowed texts."""
    grammar: str | None = None
    """A context-free grammar: llguidance's Lark, or llama.cpp's GBNF."""
    json_object: bool | None = None
    """True for any JSON object."""
    disable_additional_properties: bool = False
    """True to forbid properties that the schema does not name."""

    def __post_init__(self) -> None:
        if self.json_object is False or sum(value is not None for value in self.forms.values()) != 1:
            names = ", ".join(self.forms)
            raise _invalid("structured_outputs", f"exactly one of {names} must be given, and json_object can be True")

    @property
    def forms(self) -> Mapping[str, object]:
        """The fields for forms; all but one are None."""
        return {name: getattr(self, name) for name in ("json", "regex", "choice", "grammar", "json_object")}


@dataclass(kw_only=True, eq=True)
class SamplingParams:
    """The parameters that determine how answers are sampled and when they end. Each value is checked when it is set.

    >>> params = SamplingParams(n=8, temperature=0.6, max_tokens=100)
    >>> params.top_p = 0.95
    >>> params.top_p = 2
    Traceback (most recent call last):
      ...
    motet.errors.RequestError: Invalid 'top_p': it is 2, and must be above 0, up to 1.
    """

    n: int = 1
    """Number of choices. Choice i is the same as the only choice of a request with the seed `seed` + i."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 mean off."""
    min_p: float = 0.0
    seed: int | None = None
    """None for a random seed, or for the seeds of `LLM(seed=...)`."""
    stop: str | Sequence[str] | None = None
    """Texts that end a choice."""
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    """Texts that are not generated."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Maximum number of output tokens of a choice; None for the model's default or its length."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are reported for each output token, in addition to the
    sampled token; None for no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""
    detokenize: bool = True
    """False for answers without text."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Literal[True] = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens of the prompt, whose first tokens are removed; -1 for the model's length."""
    output_kind: RequestOutputKind | None = None
    """The content of the steps of `AsyncLLM.stream`; None means DELTA. Other methods return complete outputs."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    """Number that is added to the logit of each of these tokens."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that can be sampled; None for all."""
    logprob_token_ids: Sequence[int] | None = None
    """Tokens whose log-probabilities are reported with each output token, in place of the most likely ones."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """Distribution of the log-probabilities: the model's own, or the one that was sampled from. None means the server's
    setting."""
    thinking_token_budget: int | None = None
    """Maximum number of tokens of reasoning; None for no maximum."""
    extra_args: Mapping[str, object] | None = None
    """Arguments for extensions of vLLM workers."""
    group: Mapping[str, object] | None = None
    """When the prompt has enough answers, and which end early: the request field `group` (docs/steering.md)."""
    keep_s: float = 0.0
    """Time in seconds for which the prompt's KV cache is kept, so that `RequestOutput.kept` can generate more choices
    without a prefill; 0 to 3600."""

    def __setattr__(self, name: str, value: object) -> None:
        check = _CHECKS.get(name)
        if check is None:
            raise RequestError(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
        check(name, value)
        object.__setattr__(self, name, value)


_Check = Callable[[str, object], None]
"""Raises RequestError for a value that the field of this name cannot have."""


def _invalid(name: str, why: str) -> RequestError:
    return RequestError(f"Invalid '{name}': {why}.", param=name, code="invalid_value")


def _wrong_type(name: str, value: object, *, expected: str) -> RequestError:
    shown = f"{type(value).__name__} {value!r}"[:100]
    return RequestError(
        f"Invalid type for '{name}': expected {expected}, got {shown}.", param=name, code="invalid_type"
    )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong_type(name, value, expected="a number")
    if not SAMPLING_FIELDS[name].allows(value):
        raise _invalid(name, f"it is {value}, and must be {SAMPLING_FIELDS[name].words}")


def _integer(low: int, high: int | None = None, *, optional: bool = False) -> _Check:
    def check(name: str, value: object) -> None:
        if value is None and optional:
            return
        if not _is_integer(value):
            raise _wrong_type(name, value, expected="an integer")
        if value < low or (high is not None and value > high):
            raise _invalid(
                name,
                f"it is {value}, and must be {low} or more"
                if high is None
                else f"it is {value}, and must be from {low} to {high}",
            )

    return check


def _of(*kinds: type, expected: str) -> _Check:
    def check(name: str, value: object) -> None:
        if not isinstance(value, kinds):
            raise _wrong_type(name, value, expected=expected)

    return check


def _items(kind: type, expected: str) -> _Check:
    def check(name: str, value: object) -> None:
        if value is None:
            return
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _wrong_type(name, value, expected=expected)
        if not all(isinstance(item, kind) and not isinstance(item, bool) for item in value):
            raise _wrong_type(name, value, expected=expected)

    return check


def _stop(name: str, value: object) -> None:
    texts = [value] if isinstance(value, str) else value
    _items(str, "a text or texts")(name, texts)
    if isinstance(texts, Sequence) and "" in texts:
        raise _invalid(name, "a stop string cannot be empty")


def _biases(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise _wrong_type(name, value, expected="a mapping of token ids to numbers")
    for token, bias in value.items():
        if not (_is_integer(token) or (isinstance(token, str) and token.isdecimal())):
            raise _wrong_type(name, token, expected="token ids as keys")
        if not isinstance(bias, int | float) or not SAMPLING_FIELDS[name].allows(bias):
            raise _invalid(name, f"the bias of token {token} is {bias}, and must be {SAMPLING_FIELDS[name].words}")


def _one_of(*values: object) -> _Check:
    def check(name: str, value: object) -> None:
        if value not in values:
            raise _invalid(name, f"it is {value!r}, and must be {' or '.join(map(repr, values))}")

    return check


def _seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong_type(name, value, expected="a number")
    if not 0 <= value <= MAX_KEEP_S:
        raise _invalid(name, f"it is {value}, and must be from 0 to {MAX_KEEP_S:g}")


_SWITCH = _of(bool, expected="True or False")
_TOKENS = _items(int, "token ids, which are integers")
_OBJECT = _of(Mapping, type(None), expected="a mapping")
_COUNT = _integer(0, optional=True)

_CHECKS: Final[Mapping[str, _Check]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"), _number),
    **dict.fromkeys(("top_p", "min_p"), _number),
    **dict.fromkeys(("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"), _SWITCH),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logprob_token_ids"), _TOKENS),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _COUNT),
    **dict.fromkeys(("extra_args", "group"), _OBJECT),
    "n": _integer(1),
    "top_k": _integer(-1),
    "seed": _integer(MIN_SEED, MAX_SEED, optional=True),
    "stop": _stop,
    "bad_words": _items(str, "texts"),
    "max_tokens": _integer(1, optional=True),
    "min_tokens": _integer(0),
    "spaces_between_special_tokens": _one_of(True),
    "truncate_prompt_tokens": _integer(-1, optional=True),
    "output_kind": _one_of(None, *RequestOutputKind),
    "structured_outputs": _of(StructuredOutputsParams, type(None), expected="StructuredOutputsParams"),
    "logit_bias": _biases,
    "logprobs_mode": _one_of(None, "raw_logprobs", "processed_logprobs"),
    "thinking_token_budget": _integer(-1, optional=True),
    "keep_s": _seconds,
}

GENERATE_ONLY: Final = frozenset({"logprobs", "logprob_token_ids", "logprobs_mode", "prompt_logprobs", "detokenize"})
"""Fields of `/inference/v1/generate` that the route that renders a chat lacks, or has in another form."""
NOT_IN_BODY: Final = frozenset({"group", "keep_s", "output_kind", "spaces_between_special_tokens"})
"""Fields that the object `sampling_params` of a request does not have."""
ALWAYS_SENT: Final = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
"""Fields that are sent even if they have their default, since a model can have other defaults."""


def sampling_body(params: SamplingParams) -> dict[str, object]:
    """Returns the fields as the JSON object `sampling_params` of a request."""
    body: dict[str, object] = {}
    for field in fields(params):
        name, value = field.name, getattr(params, field.name)
        if name not in NOT_IN_BODY and value is not None and (name in ALWAYS_SENT or value != field.default):
            body[name] = value
    if params.max_tokens is not None:
        body["max_tokens"] = params.max_tokens
    if isinstance(params.structured_outputs, StructuredOutputsParams):
        outputs = params.structured_outputs
        form = {name: value for name, value in outputs.forms.items() if value is not None}
        body["structured_outputs"] = form | (
            {"disable_additional_properties": True} if outputs.disable_additional_properties else {}
        )
    return body


class PromptSeeds:
    """The seeds of prompts that have none, which depend only on the order of the prompts.

    >>> seeds = PromptSeeds(7)
    >>> [seeds.next(SamplingParams()).seed for _ in range(3)]
    [7, 1048583, 2097159]
    """

    def __init__(self, first: int | None) -> None:
        """`first`: None to leave the choice of seeds to the server."""
        self._first = first
        self._numbers = itertools.count()

    def next(self, params: SamplingParams) -> SamplingParams:
        """Returns a copy of the parameters of the next prompt, with its seed."""
        number = next(self._numbers)
        if self._first is None or params.seed is not None:
            return replace(params)
        return replace(params, seed=(self._first + number * SEEDS_APART) % 2**63)
