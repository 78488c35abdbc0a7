"""A checked request as a plan for the engine: one group for each prompt.

1. the route checks the body, collects the facts that depend on the route (`RouteOptions`), and calls `check_size`
2. `chat_prompt`, `completion_prompts` turn the client's prompts into token ids, long texts in a thread
3. `with_answer_format`, `with_grammar` add the parser of the answers, and the grammar that they must follow: the form
   in the request, a tool call, or either
4. `make_plan` checks the request against the prompts and the model's limits, and plans the groups"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import msgspec

from motet.api.generation.answer_form import AnswerForm
from motet.api.generation.group_schema import GroupFields
from motet.api.generation.kv_params import PrefillOrder, RequestContext
from motet.api.generation.request_fields import RequestFields, SamplingFields, StreamingFields
from motet.api.http.admission import answer_too_large, client_id_of
from motet.api.http.failure import above_maximum, invalid_value
from motet.api.http.long_work import work_size
from motet.api.http.request_spans import NO_REQUEST_SPAN, RequestSpan
from motet.api.http.schema import schema_text
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.errors import RequestError
from motet.ids import RequestId, new_request_id
from motet.policies.steering import GroupPolicy
from motet.text.choice import TextRules
from motet.text.parts import AnswerFormat
from motet.text.stop_strings import StopStrings
from motet.text.tokenizer import Tokenizer
from motet.types import (
    BACKGROUND_PRIORITY,
    VERBATIM_FIELDS,
    GenerateRequest,
    Grammar,
    LogprobsMode,
    SamplingParams,
    choice_starts,
)

CAPPED_HEADER = "x-motet-max-tokens-capped"
"""Header with the maximum number of output tokens, if it is lower than the request states (`--max-tokens-policy`)."""
MAX_PROMPT_LOGPROBS = 2_000_000
"""Maximum number of prompt log-probabilities in one request, including alternatives. Each takes up to 110 bytes in an
answer."""
MAX_STREAMED_PROMPT_LOGPROBS = 200_000
"""The same for a streamed answer, whose first chunks contain all of them (`echo`)."""
MIN_LOGPROB_BYTES = 20
"""Minimum size of a log-probability in an answer."""
MAX_KEYS, MAX_KEY_CHARS = 10, 50
"""Limits on the number and the length of wrong keys that an error lists."""
MAX_ID_DIGITS = 20
"""Maximum number of digits of a token id as a JSON key, more than any vocabulary needs."""
GROUP_CHARS = 64
"""Number of characters whose tokenisation costs as much as planning one group, or as preparing four choices."""


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
    """The groups of a request, one for each prompt."""

    head: AnswerHead
    served: ServedModel
    groups: tuple[GenerateRequest, ...]
    order: PrefillOrder | None = None
    """The order to prefill the only group for another server; None if the groups generate answers."""
    client: str | None = None
    """The client whose limits apply; None if another Motet server sent the request."""
    body_bytes: int = 0
    span: RequestSpan = NO_REQUEST_SPAN
    rules: TextRules = field(default_factory=TextRules)
    each_rules: tuple[TextRules, ...] = ()
    """The rules of each group, where they differ; empty if `rules` are the rules of all groups."""
    policy: GroupPolicy | None = None
    """The policy of each group; None if all its choices generate to their ends."""
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def group_size(self) -> int:
        return len(self.groups[0].choices)

    @property
    def num_choices(self) -> int:
        """Number of choices of all groups."""
        return sum(len(group.choices) for group in self.groups)

    def rules_of(self, number: int) -> TextRules:
        """Returns the rules of a group. `number`: number of its prompt."""
        return self.each_rules[number] if self.each_rules else self.rules

    @property
    def choice_indices(self) -> Iterator[int]:
        """The index of each choice in the answer. The choices of each prompt follow the choices of the previous one."""
        for number, group in enumerate(self.groups):
            yield from (number * self.group_size + start.index for start in group.choices)

    @property
    def capped_max_tokens(self) -> int | None:
        """The lowest maximum number of output tokens that is lower than the request states; None if there is none."""
        lower = (group.sampling.max_tokens for number, group in enumerate(self.groups) if self.rules_of(number).capped)
        return min(lower, default=None)

    def capped_headers(self) -> dict[str, str]:
        """Returns the header that states the lower maximum, if there is one."""
        return {} if self.capped_max_tokens is None else {CAPPED_HEADER: str(self.capped_max_tokens)}

    @property
    def num_listed(self) -> int:
        """Number of log-probabilities that the answer has for each output token."""
        return _num_listed(self.groups[0].sampling) if self.rules.logprobs else 0


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """The facts about a request that depend on its route."""

    context: RequestContext
    streaming: StreamingFields
    prefix: str
    """Start of the answer's id, such as `chatcmpl`."""
    prompt_param: str
    logprobs_param: str = "logprobs"
    count_param: str = "n"
    """The fields with the prompt, the number of alternatives, and the number of choices, for errors."""
    num_choices: int
    """Number of choices of each prompt."""
    default_max_tokens: int | None = None
    """Maximum number of output tokens if the request has none; None for the model's default, or its limit."""
    ignores_defaults: bool = False
    """True if sampling fields that the request omits are neutral, whatever the model's defaults are. Only `max_tokens`
    has its default. For routes of token ids, as in vLLM and SGLang."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    scored_from: int = 0
    """Place of the first token of each prompt whose log-probability is needed."""
    prompt_repeats: int = 1
    """Number of times that the answer contains the log-probabilities of each prompt."""
    logprobs_mode: LogprobsMode | None = None
    """None for the server's setting."""
    prompt_only: bool = False
    """True if the answers are empty."""
    param: str = ""
    """Path of the sampling fields in the body, such as `sampling_params.`."""
    format: AnswerFormat | None = None
    """The parser of a choice's text; None if the text is shown unchanged."""
    grammar: Grammar | None = None
    """The grammar of every choice; None for any text."""
    group: GroupFields | None = None
    """The policy of each group, as the request states it."""


def make_plan(
    service: Service,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingFields,
    request: RequestFields,
    options: RouteOptions,
) -> Plan:
    """Returns the plan. Raises `RequestError` for a request that the model cannot answer. Can run in any thread."""
    context, caller, served = options.context, options.context.caller, options.context.served
    context.check(prompts)
    rights = service.rights(caller.client)
    _check_priority(request.priority, rights.min_priority)
    _check_scores(prompts, options)
    answer_id = new_request_id(options.prefix, named=caller.own_id)
    bias = _logit_bias(sampling.logit_bias, served.info.vocab_size, param=f"{options.param}logit_bias")
    options = replace(options, logprobs_mode=options.logprobs_mode or service.config.logprobs_mode)
    policy = _policy(sampling, options, max_top=service.config.max_logprobs)
    client, caps = rights.client_id or client_id_of(caller.work_client), service.config.max_tokens_policy == "cap"
    sampling_of = _sampling_of(sampling, options=options, logit_bias=bias, policy=policy, caps=caps)
    unset = _unset_fields(sampling, options)
    groups = tuple(
        GenerateRequest(
            request_id=answer_id if len(prompts) == 1 else RequestId(f"{answer_id}-{number}"),
            prompt=tuple(prompt),
            choices=choice_starts(options.num_choices, service.draw_seed() if sampling.seed is None else sampling.seed),
            sampling=sampling_of(len(prompt)),
            cache_salt=rights.cache_salt + request.cache_salt,
            keep_s=request.keep_s,
            priority=BACKGROUND_PRIORITY if rights.background else request.priority,
            client=client,
            client_weight=rights.client_weight,
            ticket=context.ticket,
            trace=caller.trace,
            session_id=caller.session_id or (answer_id if request.keep_s else ""),
            unset_fields=unset,
            seeded=sampling.seed is not None,
            stops=bool(sampling.stop) or policy is not None,
            scored_from=min(options.scored_from, len(prompt)),
        )
        for number, prompt in enumerate(prompts)
    )
    _check_answer(groups, options, maximum=service.config.max_open_answer_bytes)
    requested, rules = sampling.requested_max_tokens, _rules(sampling, options)
    capped = [requested is not None and group.sampling.max_tokens < requested for group in groups]
    each_rules = tuple(msgspec.structs.replace(rules, capped=lower) for lower in capped) if any(capped) else ()
    return Plan(
        head=AnswerHead(id=answer_id, created=int(time.time()), model=served.name, fingerprint=served.info.fingerprint),
        served=served,
        groups=groups,
        order=context.order,
        client=caller.client,
        body_bytes=caller.body_bytes,
        span=caller.span,
        rules=rules,
        each_rules=each_rules,
        policy=policy,
        include_usage=options.streaming.include_usage or service.config.enable_force_include_usage,
        continuous_usage=options.streaming.continuous_usage or service.config.enable_force_include_usage,
    )


def joined_plans(service: Service, plans: Sequence[Plan], *, options: RouteOptions) -> Plan:
    """Returns the plan of a request with several prompts from the plans of each prompt, whose sampling fields differ.
    Raises `RequestError` for limits that the prompts exceed together."""
    groups = tuple(group for plan in plans for group in plan.groups)
    _check_scores([group.prompt for group in groups], options)
    _check_answer(groups, options, maximum=service.config.max_open_answer_bytes)
    first = plans[0]
    named = (
        msgspec.structs.replace(group, request_id=RequestId(f"{first.head.id}-{number}"))
        for number, group in enumerate(groups)
    )
    return replace(first, groups=tuple(named), each_rules=tuple(plan.rules_of(0) for plan in plans))


def _rules(sampling: SamplingFields, options: RouteOptions) -> TextRules:
    return TextRules(
        stops=StopStrings(sampling.stop) if sampling.stop else None,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=options.logprobs is not None,
        prompt_only=options.prompt_only,
        format=options.format,
    )


def _check_priority(priority: int, minimum: int | None) -> None:
    if minimum is not None and priority < minimum:
        raise invalid_value("priority", f"{priority}; your API key may have {minimum} or more")


def _policy(fields: SamplingFields, options: RouteOptions, *, max_top: int) -> GroupPolicy | None:
    """Returns the policy of the groups, if there is one. Raises `RequestError` for a policy that they cannot have, and
    for more than `max_top` alternatives to each token."""
    _check_alternatives(options, max_top)
    if options.group is None or options.context.order is not None:
        return None
    if options.group.confidence is not None:
        if fields.logprob_token_ids:
            raise invalid_value(f"{options.param}logprob_token_ids", "'group.confidence' needs the likeliest tokens")
        if options.logprobs is not None and options.logprobs_mode is not LogprobsMode.RAW:
            why = "these are processed log-probabilities, and 'group.confidence' needs the model's own"
            raise invalid_value(options.param + options.logprobs_param, why)
    return options.group.policy(options.num_choices, max_top=max_top)


def _check_alternatives(options: RouteOptions, maximum: int) -> None:
    """Raises `RequestError` for more alternatives to each token than the server allows."""
    for name, num_top in ((options.logprobs_param, options.logprobs), ("prompt_logprobs", options.prompt_logprobs)):
        if num_top is not None and num_top > maximum:
            raise above_maximum(options.param + name, num_top, maximum=maximum, flag="--max-logprobs")


def check_prompt_logprobs(
    num_tokens: int, num_top: int | None, *, prompt_param: str, repeats: int = 1, streamed: bool = False
) -> None:
    """Raises `RequestError` for too many log-probabilities of prompts: they are kept until the answer, which contains
    them `repeats` times."""
    num_logprobs = 0 if num_top is None else num_tokens * (1 + num_top) * repeats
    maximum = MAX_STREAMED_PROMPT_LOGPROBS if streamed else MAX_PROMPT_LOGPROBS
    if num_logprobs > maximum:
        each = f", for each of {repeats} choices," if repeats > 1 else ""
        why = f"log-probabilities of {num_tokens} tokens with {num_top} alternatives{each} are {num_logprobs}"
        request = "a streamed request" if streamed else "a request"
        raise invalid_value(prompt_param, f"{why}, and {request} can have at most {maximum}; send fewer prompts")


def _check_scores(prompts: Sequence[Sequence[int]], options: RouteOptions) -> None:
    check_prompt_logprobs(
        sum(map(len, prompts)),
        options.prompt_logprobs,
        prompt_param=options.prompt_param,
        repeats=options.prompt_repeats,
        streamed=options.streaming.stream,
    )


def _check_answer(groups: Sequence[GenerateRequest], options: RouteOptions, *, maximum: int) -> None:
    """Raises `RequestError` if the log-probabilities that the answer will have in any case take more than `maximum`
    bytes. Apart from this, the bytes of answers are counted while they grow (`AnswerMemory`)."""
    if options.logprobs is None or options.streaming.stream or options.group is not None:
        return
    logprobs = sum(len(group.choices) * _min_tokens(group) * _num_listed(group.sampling) for group in groups)
    if (num_bytes := MIN_LOGPROB_BYTES * logprobs) > maximum:
        why = f"its {logprobs} log-probabilities take at least {num_bytes} bytes"
        raise answer_too_large(why, maximum=maximum, param=f"{options.param}max_tokens")


def _min_tokens(group: GenerateRequest) -> int:
    """Returns the minimum number of output tokens of a choice."""
    sampling = group.sampling
    uses_all_tokens = sampling.ignore_eos and sampling.grammar is None and not (group.stops or sampling.stop_token_ids)
    return sampling.max_tokens if uses_all_tokens else sampling.min_tokens


def _num_listed(sampling: SamplingParams) -> int:
    """Returns the number of log-probabilities of each output token."""
    return 1 + (sampling.logprobs or 0) + len(sampling.logprob_token_ids)


def check_size(service: Service, num_prompts: int, *, options: RouteOptions) -> None:
    """Raises if the request has too many prompts or choices, or would not be admitted now (`Service.check_size`)."""
    service.check_size(
        options.context.caller.client,
        num_prompts=num_prompts,
        n=options.num_choices,
        max_n=options.context.served.max_group(service.config),
        count_param=options.count_param,
        prompt_param=options.prompt_param,
    )


def _sampling_of(
    fields: SamplingFields,
    *,
    options: RouteOptions,
    logit_bias: dict[int, float],
    policy: GroupPolicy | None,
    caps: bool,
) -> Callable[[int], SamplingParams]:
    """Returns a function from the length of a prompt to its parameters. All of them share `logit_bias` and the lists
    of token ids, which can be long. `caps`: True to reduce a maximum number of tokens that does not fit."""
    served, has_logprobs = options.context.served, options.logprobs is not None
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        check_tokens(getattr(fields, name) or (), served.info.vocab_size, param=options.param + name)
    logprobs = 0 if has_logprobs and fields.logprob_token_ids else options.logprobs
    if policy is not None and policy.confidence is not None:
        logprobs = max(logprobs or 0, policy.confidence.top)
    bad_word_ids = _bad_word_ids(fields.bad_words, served.tokenizer)
    if fields.allowed_token_ids and {(token,) for token in fields.allowed_token_ids} <= {*bad_word_ids}:
        raise invalid_value(f"{options.param}bad_words", "they are all tokens of 'allowed_token_ids'")
    defaults = _defaults(fields, options)
    params = SamplingParams(
        max_tokens=0,
        bad_words=tuple(fields.bad_words),
        bad_word_ids=bad_word_ids,
        extra_args=schema_text(fields.extra_args) if fields.extra_args else "",
        top_k=min(max(int(defaults.get("top_k", fields.top_k)), 0), served.info.vocab_size),
        logit_bias=logit_bias,
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        min_tokens=fields.min_tokens,
        stop_token_ids=tuple(fields.stop_token_ids),
        logprobs=logprobs,
        logprob_token_ids=tuple(fields.logprob_token_ids) if has_logprobs else (),
        logprobs_mode=(options.logprobs_mode if has_logprobs else None) or LogprobsMode.RAW,
        prompt_logprobs=options.prompt_logprobs,
        grammar=options.grammar,
        **{name: defaults.get(name, getattr(fields, name)) for name in VERBATIM_FIELDS},
    )
    default_max_tokens = options.default_max_tokens
    if default_max_tokens is None and (of_model := served.default_sampling_params.get("max_tokens")) is not None:
        default_max_tokens = max(int(of_model), fields.min_tokens)

    @cache
    def of_length(prompt_len: int) -> SamplingParams:
        max_tokens = served.preparer.max_tokens(
            prompt_len,
            fields.requested_max_tokens,
            default=default_max_tokens,
            param=options.prompt_param,
            scored=options.prompt_only,
            caps=caps,
        )
        if fields.min_tokens > max_tokens:
            why = f"{fields.min_tokens} is more than the {max_tokens} tokens that a choice can have"
            raise invalid_value(f"{options.param}min_tokens", why)
        return msgspec.structs.replace(params, max_tokens=max_tokens)

    return of_length


def _defaults(fields: SamplingFields, options: RouteOptions) -> dict[str, int | float]:
    """Returns the model's defaults of the fields that the request omits."""
    defaults = {} if options.ignores_defaults else options.context.served.default_sampling_params
    return {name: value for name, value in defaults.items() if name not in fields.model_fields_set}


def _unset_fields(fields: SamplingFields, options: RouteOptions) -> tuple[str, ...]:
    """Returns the fields that the request omits and whose default only the worker knows."""
    served = options.context.served
    unknown = served.default_rules.unknown(served.info.default_sampling_params)
    return () if options.ignores_defaults else tuple(sorted(unknown - fields.model_fields_set - {"max_tokens"}))


def _bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each word at the start of a text and after a space, each sequence once."""
    texts = (text for word in words for text in (word.lstrip(), f" {word.lstrip()}"))
    sequences = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(dict.fromkeys(filter(None, sequences)))


def _logit_bias(fields: dict[str, float], vocab_size: int, *, param: str) -> dict[int, float]:
    if wrong := [key for key in fields if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS)]:
        message = f"Invalid keys in '{param}': {_listed(wrong)}. You should only be submitting non-negative integers."
        raise RequestError(message, param=param, code="invalid_value")
    bias = {int(key): value for key, value in fields.items()}
    check_tokens(bias, vocab_size, param=param)
    return bias


def check_tokens(tokens: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Raises `RequestError` for a token that the vocabulary does not have."""
    if outside := [str(token) for token in tokens if token >= vocab_size]:
        raise invalid_value(param, f"the model's vocabulary of {vocab_size} has no token {_listed(outside)}")


def _listed(keys: Sequence[str]) -> str:
    """Returns the first keys, and the number of the others."""
    few = ", ".join(key[:MAX_KEY_CHARS] for key in keys[:MAX_KEYS])
    return few if len(keys) <= MAX_KEYS else f"{few} and {len(keys) - MAX_KEYS} more"


async def with_grammar(options: RouteOptions, form: AnswerForm | None) -> RouteOptions:
    """Returns the options with the form's grammar. Raises `RequestError` for a grammar that does not compile."""
    if form is None or options.context.order is not None:
        return options
    param = options.param + form.param
    closed = partial(form.closed_for, closes_objects=options.context.closes_objects)
    form = await options.context.caller.in_thread_if_long(
        closed, work_size(form.grammar.source.encode(errors="replace"))
    )
    await options.context.served.grammars.check(
        form.grammar,
        called=form.called or f"'{param}'",
        param=param,
        clients_own=form.clients_own,
        client=options.context.caller.work_client,
    )
    return replace(options, grammar=form.grammar)
