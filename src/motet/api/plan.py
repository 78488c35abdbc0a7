"""A checked request: what the engine gets, and what the answer needs to know of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from motet.api.caller import Caller
from motet.api.counts import Counts
from motet.api.kv_params import KVParams, PrefillOrder
from motet.api.schema_shared import GeneratingFields, SamplingFields
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.constraint import Grammar
from motet.errors import RequestError
from motet.ids import RequestId, new_request_id
from motet.text.choice import TextRules
from motet.text.parts import AnswerFormat
from motet.types import GenerateRequest, SamplingParams, choice_starts

MAX_ID_DIGITS = 20
"""Of a token id that is a JSON key; far more than any vocabulary needs."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request on its way to the engine: one group a prompt, all with the same rules."""

    head: Head
    served: ServedModel
    """What answers it."""
    groups: tuple[GenerateRequest, ...]
    order: PrefillOrder | None = None
    """If the one group there is shall only be prefilled, for others."""
    client: str | None = None
    """Whose limits it counts against; None: it comes from another server of ours."""
    rules: TextRules
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def group_size(self) -> int:
        return len(self.groups[0].choices)

    @property
    def num_choices(self) -> int:
        """Of all groups."""
        return len(self.groups) * self.group_size


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a route adds to the fields all routes have."""

    served: ServedModel
    """The model that is asked."""
    prefix: str
    """Of the answer's id, as in `chatcmpl-`."""
    caller: Caller
    kv_params: KVParams
    prompt_param: str
    """The field the prompt came in, for errors about its length."""
    num_choices: int
    """To be made of each prompt."""
    default_max_tokens: int | None
    """None: as many as the model has room for."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    count_param: str = "n"
    """The field that said how many choices."""
    param: str = ""
    """Where the sampling fields stand in the body, as in `sampling_params.`."""
    format: AnswerFormat | None = None
    """How the text of a choice is read; None: it is shown as it is."""
    grammar: Grammar | None = None
    """What every choice must be; None: anything."""


def make_plan(
    service: Service,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingFields,
    around: GeneratingFields,
    wanted: Wanted,
) -> Plan:
    """Raises `RequestError` for what only the server's limits and the prompts can refuse."""
    check_counts(service, len(prompts), wanted)
    wanted.kv_params.check(prompts)
    served = wanted.served
    answer_id = new_request_id(wanted.prefix)
    seed = service.draw_seed() if sampling.seed is None else sampling.seed
    groups = tuple(
        GenerateRequest(
            request_id=_group_id(answer_id, number, len(prompts)),
            prompt=tuple(prompt),
            choices=choice_starts(wanted.num_choices, seed),
            sampling=_sampling(len(prompt), sampling, wanted),
            cache_salt=around.cache_salt,
            priority=around.priority,
            ticket=wanted.kv_params.ticket,
            trace=wanted.caller.trace,
            session_id=wanted.caller.session_id,
            seeded=sampling.seed is not None,
            stops=bool(sampling.stop),
        )
        for number, prompt in enumerate(prompts)
    )
    return Plan(
        head=Head(id=answer_id, created=int(time.time()), model=served.name, fingerprint=served.info.fingerprint),
        served=served,
        groups=groups,
        order=wanted.kv_params.order,
        client=wanted.caller.client,
        rules=_rules(sampling, wanted),
        stream=around.stream,
        include_usage=around.include_usage,
        continuous_usage=around.continuous_usage,
    )


def check_counts(service: Service, num_prompts: int, wanted: Wanted) -> None:
    Counts(
        num_prompts=num_prompts,
        num_choices=wanted.num_choices,
        most_choices=wanted.served.max_group(service.config),
        count_param=wanted.param + wanted.count_param,
        prompt_param=wanted.prompt_param,
    ).check(service.config)


def _group_id(answer_id: RequestId, number: int, num_prompts: int) -> RequestId:
    return answer_id if num_prompts == 1 else RequestId(f"{answer_id}-{number}")


def _sampling(prompt_len: int, fields: SamplingFields, wanted: Wanted) -> SamplingParams:
    vocab_size = wanted.served.info.vocab_size
    for token in fields.stop_token_ids:
        _check_token(token, vocab_size, f"{wanted.param}stop_token_ids")
    max_tokens = wanted.served.preparer.max_tokens(
        prompt_len, fields.max_tokens_asked, default=wanted.default_max_tokens, param=wanted.prompt_param
    )
    if fields.min_tokens > max_tokens:
        name = f"{wanted.param}min_tokens"
        raise RequestError(
            f"Invalid '{name}': {fields.min_tokens} is more than the {max_tokens} tokens that a choice may have.",
            param=name,
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=min(max(fields.top_k, 0), vocab_size),
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=_logit_bias(fields.logit_bias, vocab_size, f"{wanted.param}logit_bias"),
        min_tokens=fields.min_tokens,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=tuple(fields.stop_token_ids),
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        grammar=wanted.grammar,
    )


def _logit_bias(fields: dict[str, float], vocab_size: int, param: str) -> dict[int, float]:
    bias = {}
    for key, value in fields.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise RequestError(
                f"Invalid key in '{param}': {key}. You should only be submitting non-negative integers.",
                param=param,
                code="invalid_value",
            )
        _check_token(int(key), vocab_size, param)
        bias[int(key)] = value
    return bias


def _check_token(token: int, vocab_size: int, param: str) -> None:
    if token >= vocab_size:
        raise RequestError(
            f"Invalid '{param}': token id {token} is outside the model's vocabulary of {vocab_size}.",
            param=param,
            code="invalid_value",
        )


def _rules(fields: SamplingFields, wanted: Wanted) -> TextRules:
    return TextRules(
        stop=tuple(fields.stop),
        include_stop_str_in_output=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        min_tokens=fields.min_tokens,
        logprobs=wanted.logprobs is not None,
        format=wanted.format,
    )
