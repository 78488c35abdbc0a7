"""A checked request on its way from its route to the engine.

1. the route's schema is read, `RouteOptions` says what else the route knows, and `check_size` looks at the limits
2. `chat_prompt`, `completion_prompts` make token ids of what the client wrote; long texts in a thread
3. `with_answer_rules`, `held_to` say how the answers are read, and what they must be: as the request says, a call of a
   tool, or either
4. `make_plan` checks what only the model's limits and the prompts can refuse, and plans a group a prompt
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

import msgspec

from motet.api.generation.group_schema import GroupFields
from motet.api.generation.kv_params import PrefillOrder, RequestContext
from motet.api.generation.schema import AnswerForm, GeneratingFields, SamplingFields, schema_text
from motet.api.http.body import in_turn
from motet.api.http.failure import above_maximum, invalid_value, unsupported_parameter
from motet.api.http.request_spans import NO_REQUEST_SPAN, RequestSpan
from motet.api.openai.chat_schema import ChatPrompt, ChatRequest
from motet.api.openai.completions_schema import Prompt
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.errors import GrammarError, RequestError
from motet.grammar.closed import closed_schema, closed_source
from motet.ids import RequestId, new_request_id
from motet.log import ONCE_A_MINUTE
from motet.policies.steering import GroupPolicy
from motet.text.choice import TextRules
from motet.text.parts import AnswerFormat
from motet.text.prepare import PromptPreparer
from motet.text.stop_strings import StopStrings
from motet.text.tools.grammar import json_rule
from motet.text.tools.tool_format import ToolFormat, ToolMode, ToolRules
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
LONG_TEXT = 8192
"""Texts with more characters are tokenised, and schemas closed, in a thread; for shorter ones the way there and back
costs more."""
TURN_CHARS = 64
"""A message takes as long as so many characters more."""
GROUP_CHARS = 64
"""To plan a group takes as long as so many characters, and to make ready for the answers of four choices too."""
TOOL_CHARS = 1024
"""The grammar of a tool takes as long as so many characters of a schema; it may take a hundred times as long."""


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """The fields that every object of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str = ""
    """Empty for answers that other servers write."""


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
    around: GeneratingFields,
    options: RouteOptions,
) -> Plan:
    """Raises `RequestError` for what only the model's limits and the prompts can refuse. May run in a thread."""
    context, served = options.context, options.context.served
    context.check(prompts)
    rights = service.rights(context.caller.client)
    _check_priority(around.priority, rights.least_priority)
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
            cache_salt=rights.cache_salt + around.cache_salt,
            keep_s=around.keep_s,
            priority=around.priority,
            ticket=context.ticket,
            trace=context.caller.trace,
            session_id=context.caller.session_id or (answer_id if around.keep_s else ""),
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
        include_usage=around.include_usage,
        continuous_usage=around.continuous_usage,
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
        prompt_len, fields.max_tokens_asked, default=options.default_max_tokens, param=options.prompt_param
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


async def chat_prompt(preparer: PromptPreparer, chat: ChatPrompt, *, param: str = "messages") -> list[int]:
    """`param`: the field that the messages came in."""
    tools = [] if chat.tool_rules is None else [tool.for_template() for tool in chat.tools]
    num_chars = sum(TURN_CHARS + len(message.text) for message in chat.messages) + len(msgspec.json.encode(tools))
    template_kwargs = _effort(preparer, chat.reasoning_effort) | chat.chat_template_kwargs

    def rendered() -> list[int]:
        text = preparer.template.render(
            [message.for_template() for message in chat.messages],
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        # The template writes the special tokens.
        return preparer.text_prompt(text, bool(chat.add_special_tokens), param=param)

    ids = await beside_the_loop(rendered, num_chars)
    preparer.check_prompt(ids, param=param)
    return ids


def _effort(preparer: PromptPreparer, effort: str | None) -> dict[str, object]:
    """Returns the variables that the chat template has for `reasoning_effort`."""
    if effort is None:
        return {}
    known: dict[str, object] = {"reasoning_effort": effort} if preparer.template.knows("reasoning_effort") else {}
    if effort == "none":
        return known | ({"enable_thinking": False} if preparer.template.knows("enable_thinking") else {})
    if not known:
        log.info("reasoning_effort is ignored: the model's chat template has no word for it", extra=ONCE_A_MINUTE)
    return known


async def text_prompt(preparer: PromptPreparer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    return await beside_the_loop(partial(preparer.text_prompt, text, add_special_tokens, param=param), len(text))


async def completion_prompts(
    preparer: PromptPreparer, prompts: Sequence[Prompt], *, add_special_tokens: bool, param: str = "prompt"
) -> list[Sequence[int]]:
    """`param`: the field that they came in."""
    checked: list[Sequence[int]] = []
    for number, prompt in enumerate(prompts):
        place = param if len(prompts) == 1 else f"{param}[{number}]"
        ids: Sequence[int] = prompt if isinstance(prompt, tuple) else ()
        if isinstance(prompt, str):
            ids = await text_prompt(preparer, prompt, add_special_tokens=add_special_tokens, param=place)
        await beside_the_loop(partial(preparer.check_prompt, ids, param=place), len(ids))
        checked.append(ids)
        await asyncio.sleep(0)  # others' turn: there may be hundreds of prompts with thousands of tokens each
    return checked


async def beside_the_loop(work: Callable[[], T], size: int) -> T:
    """Does work in a thread if it is long. `size`: characters, or as many tokens."""
    return work() if size < LONG_TEXT else await in_turn(work)


def check_reading(served: ServedModel, chat: ChatRequest) -> None:
    """Raises `RequestError` if the request asks for a way to read answers that does not fit this model."""
    if served.formats.harmony and not chat.separate_reasoning:
        why = "cannot be false for this model, which thinks on a channel of its own"
        raise unsupported_parameter("separate_reasoning", why)
    if chat.tool_rules is not None and served.formats.tools is None:
        raise RequestError(
            "Invalid 'tools': calls of tools are not read from this model's answers (see --tool-parser).",
            param="tools",
            code="unsupported_parameter",
        )


async def with_answer_rules(options: RouteOptions, chat: ChatRequest, *, prompt: Sequence[int]) -> RouteOptions:
    """Returns the options with the format and the grammar of answers to `prompt`, if answers are wanted."""
    if options.context.order is not None:
        return options
    formats, rules = options.context.served.formats, chat.tool_rules
    begun = chat.messages[-1].text if chat.continue_final_message else ""
    format = formats.for_request(prompt, begun=begun, tools=rules, separate_reasoning=chat.separate_reasoning)
    read = options if format is None else replace(options, format=format)
    form = await beside_the_loop(partial(form_of, chat, options.context), len(chat.tools) * TOOL_CHARS)
    if form is None:
        return read
    thinking = formats.thinking(prompt, begun=begun, calls=form != chat.form)
    try:
        return await held_to(read, form._replace(grammar=msgspec.structs.replace(form.grammar, thinking=thinking)))
    except GrammarError:
        if rules is not None:
            await _check_each(chat, rules, options=read)
        raise


async def _check_each(chat: ChatRequest, rules: ToolRules, *, options: RouteOptions) -> None:
    """Raises `GrammarError` if no grammar can be made of the form alone, or of a tool that may be called."""
    if rules.mode is ToolMode.AUTO:
        await held_to(options, chat.form)
    names = {tool.name for tool in rules.callable}
    for number, tool in enumerate(chat.tools):
        name, param = tool.function.name, f"tools[{number}].function.parameters"
        if name in names:
            parameters = schema_text(tool.tool().parameters)
            if options.context.closes_objects:
                parameters = await beside_the_loop(partial(closed_source, parameters), TOOL_CHARS + len(parameters))
            grammar = Grammar(GrammarKind.JSON, parameters)
            await options.context.served.grammars.check(grammar, called=f"schema for function '{name}'", param=param)
        await asyncio.sleep(0)  # others' turn


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


def form_of(chat: ChatRequest, context: RequestContext) -> AnswerForm | None:
    """Returns what an answer must be: as it is asked for, or a call, or either. Raises `RequestError` if it cannot."""
    served = context.served
    rules, asked, tools = chat.tool_rules, chat.form, served.formats.tools
    if rules is None or tools is None:
        return asked
    if chat.response_format is not None and rules.mode is ToolMode.REQUIRED:
        asked = None  # the form is about content, and there will be none
    if asked is None:
        # A call must be there, or one of the tools wants nothing but valid ones.
        constrained = rules.mode is ToolMode.REQUIRED or any(tool.strict for tool in rules.callable)
        return _calls(tools, rules, context=context) if constrained else None
    if served.formats.harmony:
        raise RequestError(
            f"'{asked.param}' and 'tools' cannot be used together with this model; 'tool_choice' 'none' can.",
            param=asked.param,
        )
    if asked.grammar.kind is not GrammarKind.JSON or rules.mode is ToolMode.REQUIRED:
        raise RequestError(
            f"'{asked.param}' and 'tools' cannot be used together; JSON and 'tool_choice' 'auto' can, or 'none'.",
            param=asked.param,
        )
    calls = _calls(tools, replace(rules, mode=ToolMode.REQUIRED), context=context)
    return _calls_or(as_closed(asked, context), calls)


def _calls(tools: ToolFormat, rules: ToolRules, *, context: RequestContext) -> AnswerForm:
    if context.closes_objects:
        closed = [replace(tool, parameters=closed_schema(tool.parameters)) for tool in rules.callable]
        rules = replace(rules, callable=tuple(closed))
    try:
        source = tools.grammar(rules, context.served.tokenizer.special_tokens)
    except GrammarError as error:
        raise GrammarError(f"Invalid 'tools': {error.message}.", param="tools") from error
    return AnswerForm(Grammar(GrammarKind.LARK, source), "tools")


def _calls_or(asked: AnswerForm, calls: AnswerForm) -> AnswerForm:
    """Calls in the model's own way, or JSON as it was asked for, laid out as calls are."""
    as_rule = re.sub(r"^start:", "tool_calls:", calls.grammar.source, count=1, flags=re.MULTILINE)
    try:
        schema = msgspec.json.decode(asked.grammar.source, type=dict[str, object])
    except msgspec.MsgspecError:
        return asked  # it is refused as it would be without tools
    source = f"start: asked_for | tool_calls\nasked_for: {json_rule(schema)}\n{as_rule}"
    return AnswerForm(Grammar(GrammarKind.LARK, source), asked.param, f"'tools' or '{asked.param}'")
