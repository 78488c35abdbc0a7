"""A checked request on its way from its route to the engine.

1. the route's schema is read, `RouteOptions` says what else the route knows, and `check_size` looks at the limits
2. `chat_prompt`, `completion_prompts` make token ids of what the client wrote; long texts in a thread
3. `with_answer_rules`, `held_to` say how the answers are read, and what they must be: as the request says, a call of a
   tool, or either
4. `make_plan` checks what only the model's limits and the prompts can refuse, and plans a group a prompt
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

import msgspec

from motet.api.generation.answer_form import AnswerForm
from motet.api.generation.group_schema import GroupFields
from motet.api.generation.kv_params import PrefillOrder, RequestContext
from motet.api.generation.prompts import beside_the_loop
from motet.api.generation.request_fields import RequestFields, StreamingFields
from motet.api.generation.sampling_fields import SamplingFields
from motet.api.http.failure import above_maximum, invalid_value
from motet.api.http.request_spans import NO_REQUEST_SPAN, RequestSpan
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.errors import RequestError
from motet.grammar.closed import closed_source
from motet.ids import RequestId, new_request_id
from motet.policies.steering import GroupPolicy
from motet.text.choice import TextRules
from motet.text.parts import AnswerFormat
from motet.text.stop_strings import StopStrings
from motet.types import (
    VERBATIM_FIELDS,
    GenerateRequest,
    Grammar,
    GrammarKind,
    LogprobsMode,
    SamplingParams,
    choice_starts,
)

log = logging.getLogger("motet.api")

T = TypeVar("T")

MAX_SCORES = 2_000_000
"""Log-probabilities of prompts that one request may ask for, alternatives too: each takes 110 bytes."""
MAX_KEYS = 10
MAX_KEY_CHARS = 50
"""Limits on what an error lists of wrong keys."""
MAX_ID_DIGITS = 20
"""Digits that a token id may have as a JSON key; far more than any vocabulary needs."""
GROUP_CHARS = 64
"""To plan a group takes as long as so many characters, and to make ready for the answers of four choices too."""


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """The fields that every object of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str = ""
    """The engine's fingerprint; empty for answers of third-party servers."""

    def json(self, kind: str) -> bytes:
        """Returns the first fields of an object of this kind, as JSON without the closing brace."""
        fields: dict[str, str | int] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        if self.fingerprint:
            fields["system_fingerprint"] = self.fingerprint
        return msgspec.json.encode(fields)[:-1]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One group a prompt, all with the same rules."""

    head: AnswerHead
    served: ServedModel
    groups: tuple[GenerateRequest, ...]
    order: PrefillOrder | None = None
    """Set if the only group must be prefilled for others, and not written."""
    client: str | None = None
    """The client whose limits count; None if another server of ours sent the request."""
    body_bytes: int = 0
    """Size of the request."""
    span: RequestSpan = NO_REQUEST_SPAN
    rules: TextRules = field(default_factory=TextRules)
    policy: GroupPolicy | None = None
    """How each group is steered; None: all its choices are written to their ends."""
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def group_size(self) -> int:
        return len(self.groups[0].choices)

    @property
    def num_choices(self) -> int:
        """Choices of all groups."""
        return len(self.groups) * self.group_size


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """The facts about a request that depend on its route."""

    context: RequestContext
    streaming: StreamingFields
    prefix: str
    """Begins the answer's id, as in `chatcmpl-`."""
    prompt_param: str
    """The field the prompt came in, for errors about its length."""
    num_choices: int
    """Choices to make of each prompt."""
    default_max_tokens: int | None
    """None: as many as the model has room for."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    """None: as the server is set."""
    logprobs_param: str = "logprobs"
    """The field that gave the number of alternatives."""
    prompt_only: bool = False
    """True: the answers are empty."""
    count_param: str = "n"
    """The field that gave the number of choices."""
    param: str = ""
    """Where the sampling fields stand in the body, as in `sampling_params.`."""
    format: AnswerFormat | None = None
    """How the text of a choice is read; None: it is shown as it is."""
    grammar: Grammar | None = None
    """The grammar of every choice; None: any text."""
    group: GroupFields | None = None
    """How each group is to be steered."""


def make_plan(
    service: Service,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingFields,
    request: RequestFields,
    options: RouteOptions,
) -> Plan:
    """Raises `RequestError` for what only the model's limits and the prompts can refuse. May run in a thread."""
    context, served = options.context, options.context.served
    context.check(prompts)
    rights = service.rights(context.caller.client)
    _check_priority(request.priority, rights.min_priority)
    _check_alternatives(options, service.config.max_logprobs)
    check_scores(sum(map(len, prompts)), options.prompt_logprobs, prompt_param=options.prompt_param)
    answer_id = new_request_id(options.prefix)
    bias = _logit_bias(sampling.logit_bias, served.info.vocab_size, param=f"{options.param}logit_bias")
    if options.logprobs_mode is None:
        options = replace(options, logprobs_mode=service.config.logprobs_mode)
    policy = _policy(sampling, options, most_top=service.config.max_logprobs)
    sampling_of = cache(partial(_sampling, fields=sampling, options=options, logit_bias=bias, policy=policy))
    groups = tuple(
        GenerateRequest(
            request_id=answer_id if len(prompts) == 1 else RequestId(f"{answer_id}-{number}"),
            prompt=tuple(prompt),
            choices=choice_starts(options.num_choices, service.draw_seed() if sampling.seed is None else sampling.seed),
            sampling=sampling_of(len(prompt)),
            cache_salt=rights.cache_salt + request.cache_salt,
            keep_s=request.keep_s,
            priority=request.priority,
            ticket=context.ticket,
            trace=context.caller.trace,
            session_id=context.caller.session_id or (answer_id if request.keep_s else ""),
            seeded=sampling.seed is not None,
            stops=bool(sampling.stop) or policy is not None,
        )
        for number, prompt in enumerate(prompts)
    )
    return Plan(
        head=AnswerHead(id=answer_id, created=int(time.time()), model=served.name, fingerprint=served.info.fingerprint),
        served=served,
        groups=groups,
        order=context.order,
        client=context.caller.client,
        body_bytes=context.caller.body_bytes,
        span=context.caller.span,
        rules=TextRules(
            stops=StopStrings(sampling.stop) if sampling.stop else None,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            logprobs=options.logprobs is not None,
            prompt_only=options.prompt_only,
            format=options.format,
        ),
        policy=policy,
        include_usage=options.streaming.include_usage,
        continuous_usage=options.streaming.continuous_usage,
    )


def _check_priority(priority: int, least: int | None) -> None:
    if least is not None and priority < least:
        raise invalid_value("priority", f"{priority}; your API key may ask for {least} or more")


def _policy(fields: SamplingFields, options: RouteOptions, *, most_top: int) -> GroupPolicy | None:
    """Returns how the groups are steered. Raises `RequestError` for what they cannot have."""
    if options.group is None or options.context.order is not None:
        return None
    if options.group.confidence is not None:
        if fields.logprob_token_ids:
            raise invalid_value(f"{options.param}logprob_token_ids", "'group.confidence' needs the likeliest tokens")
        if options.logprobs is not None and options.logprobs_mode is not LogprobsMode.RAW:
            why = "these are processed log-probabilities, and 'group.confidence' needs the model's own"
            raise invalid_value(options.param + options.logprobs_param, why)
    return options.group.policy(options.num_choices, most_top=most_top)


def _check_alternatives(options: RouteOptions, most: int) -> None:
    """Raises `RequestError` for more alternatives to each token than the server allows."""
    for name, asked in ((options.logprobs_param, options.logprobs), ("prompt_logprobs", options.prompt_logprobs)):
        if asked is not None and asked > most:
            raise above_maximum(options.param + name, asked, most=most, flag="--max-logprobs")


def check_scores(num_tokens: int, num_top: int | None, *, prompt_param: str) -> None:
    """Raises `RequestError` if the log-probabilities of the prompts, which are kept until the answer, are too many."""
    num_scores = 0 if num_top is None else num_tokens * (1 + num_top)
    if num_scores > MAX_SCORES:
        why = f"log-probabilities of {num_tokens} tokens with {num_top} alternatives are {num_scores}"
        raise invalid_value(prompt_param, f"{why}, and a request may have {MAX_SCORES}; send fewer prompts")


def check_size(service: Service, num_prompts: int, *, options: RouteOptions) -> None:
    service.check_size(
        options.context.caller.client,
        num_prompts=num_prompts,
        n=options.num_choices,
        most=options.context.served.max_group(service.config),
        count_param=options.count_param,
        prompt_param=options.prompt_param,
    )


def _sampling(
    prompt_len: int,
    *,
    fields: SamplingFields,
    options: RouteOptions,
    logit_bias: dict[int, float],
    policy: GroupPolicy | None,
) -> SamplingParams:
    vocab_size = options.context.served.info.vocab_size
    allowed, scored = fields.allowed_token_ids or (), options.logprobs is not None
    named = (("stop_token_ids", fields.stop_token_ids), ("logprob_token_ids", fields.logprob_token_ids))
    for name, tokens in (*named, ("allowed_token_ids", allowed)):
        _check_tokens(tokens, vocab_size, param=options.param + name)
    max_tokens = options.context.served.preparer.max_tokens(
        prompt_len, fields.requested_max_tokens, default=options.default_max_tokens, param=options.prompt_param
    )
    if fields.min_tokens > max_tokens:
        why = f"{fields.min_tokens} is more than the {max_tokens} tokens that a choice may have"
        raise invalid_value(f"{options.param}min_tokens", why)
    logprobs = 0 if scored and fields.logprob_token_ids else options.logprobs
    if policy is not None and policy.confidence is not None:
        logprobs = max(logprobs or 0, policy.confidence.top)
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=min(max(fields.top_k, 0), vocab_size),
        logit_bias=logit_bias,
        allowed_token_ids=tuple(allowed),
        min_tokens=fields.min_tokens,
        stop_token_ids=tuple(fields.stop_token_ids),
        logprobs=logprobs,
        logprob_token_ids=tuple(fields.logprob_token_ids) if scored else (),
        logprobs_mode=(options.logprobs_mode if scored else None) or LogprobsMode.RAW,
        prompt_logprobs=options.prompt_logprobs,
        grammar=options.grammar,
        **{name: getattr(fields, name) for name in VERBATIM_FIELDS},
    )


def _logit_bias(fields: dict[str, float], vocab_size: int, *, param: str) -> dict[int, float]:
    if wrong := [key for key in fields if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS)]:
        message = f"Invalid keys in '{param}': {_listed(wrong)}. You should only be submitting non-negative integers."
        raise RequestError(message, param=param, code="invalid_value")
    bias = {int(key): value for key, value in fields.items()}
    _check_tokens(bias, vocab_size, param=param)
    return bias


def _check_tokens(tokens: Iterable[int], vocab_size: int, *, param: str) -> None:
    if outside := [str(token) for token in tokens if token >= vocab_size]:
        raise invalid_value(param, f"the model's vocabulary of {vocab_size} has no token {_listed(outside)}")


def _listed(keys: Sequence[str]) -> str:
    """Returns the first few, and how many more there are."""
    few = ", ".join(key[:MAX_KEY_CHARS] for key in keys[:MAX_KEYS])
    return few if len(keys) <= MAX_KEYS else f"{few} and {len(keys) - MAX_KEYS} more"


async def held_to(options: RouteOptions, form: AnswerForm | None) -> RouteOptions:
    """Returns the options with the form's grammar, which compiles. Raises `RequestError`."""
    if form is None or options.context.order is not None:
        return options
    param = options.param + form.param
    form = await beside_the_loop(partial(as_closed, form, options.context), len(form.grammar.source))
    grammars, called = options.context.served.grammars, form.called or f"'{param}'"
    await grammars.check(form.grammar, called=called, param=param, clients_own=form.clients_own)
    return replace(options, grammar=form.grammar)


def as_closed(form: AnswerForm, context: RequestContext) -> AnswerForm:
    """Returns a form with the objects of its schema closed, if it is one and they are to be."""
    if form.grammar.kind is not GrammarKind.JSON or not (form.closed or context.closes_objects):
        return form
    return form._replace(grammar=msgspec.structs.replace(form.grammar, source=closed_source(form.grammar.source)))
