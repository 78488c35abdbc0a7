"""A checked chat as a plan: its prompt, the parser of its answers, and the grammar that they must follow."""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from motet.api.generation.answer_form import AnswerForm
from motet.api.generation.kv_params import RequestContext
from motet.api.generation.plan import Plan, RouteOptions, check_size, make_plan, with_grammar
from motet.api.generation.prompts import rendered_prompt, truncated
from motet.api.http.caller import Caller
from motet.api.http.failure import unsupported_parameter
from motet.api.http.long_work import in_thread_of
from motet.api.http.schema import schema_text
from motet.api.openai.chat_schema import ChatPrompt, ChatRequest, ToolField
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.errors import GrammarError, RequestError
from motet.grammar.schema.client_schema import closed_schema, closed_source
from motet.log import ONCE_A_MINUTE
from motet.settings.server_config import ServerConfig
from motet.text.answers import ForcedCalls
from motet.text.parts import AnswerFormat
from motet.text.prepare import PromptPreparer, request_template
from motet.text.rendering.client_texts import RenderedPrompt
from motet.text.tools.grammar import json_rule
from motet.text.tools.tool_format import ToolMode, ToolRules
from motet.types import ANY_ANSWER, Grammar, GrammarKind, Thinking, ThinkingBudget

log = logging.getLogger("motet.api")

BUDGET_PARAM = "thinking_token_budget"
TOOL_CHARS = 1024
"""Number of characters of a schema that cost as much as the grammar of one tool. A grammar can cost 100 times more."""


async def plan_chat(
    service: Service,
    body: ChatRequest,
    *,
    context: RequestContext,
    prefix: str = "chatcmpl",
    prompt_param: str = "messages",
    generated: bool = False,
) -> Plan:
    """Returns the plan of a checked chat, for an answer in any shape. `generated`: True if its tokens have been
    generated, so that they need no grammar."""
    given = body.prompt_token_ids
    prompt_param = prompt_param if given is None else "prompt_token_ids"
    options = RouteOptions(
        context=context,
        streaming=body,
        prefix=prefix,
        prompt_param=prompt_param,
        num_choices=body.n,
        logprobs=body.num_logprobs,
        logprobs_param="top_logprobs",
        prompt_logprobs=body.prompt_logprobs,
        scored_from=body.prompt_logprobs_from,
        group=body.group,
    )
    check_answer_format(context.served, body)
    check_size(service, 1, options=options)
    if given is not None:
        prompt, check = given, partial(context.served.preparer.check_prompt, given, param=prompt_param)
        await context.caller.in_thread_if_long(check, len(given))
    else:
        preparer, caller = context.served.preparer, context.caller
        prompt = await chat_prompt(preparer, body, caller=caller, config=service.config, param=prompt_param)
    length, reserved = context.served.info.max_model_len, body.requested_max_tokens or 1
    shown = truncated(prompt, body, max_model_len=length, num_reserved=reserved)
    if generated:
        format = await context.caller.in_thread_if_long(partial(answer_format, context.served, body, prompt=shown))
        options = replace(options, format=format)
    else:
        options = await with_answer_format(options, body, prompt=shown)
    return make_plan(service, [shown], sampling=body, request=body, options=options)


async def chat_prompt(
    preparer: PromptPreparer,
    chat: ChatPrompt,
    *,
    caller: Caller,
    config: ServerConfig,
    param: str = "messages",
) -> list[int]:
    """Returns the token ids of a chat's prompt. `param`: the field with the messages."""
    prompt = await chat_text(preparer, chat, caller=caller, config=config)

    def tokenised() -> list[int]:
        # The template adds the special tokens.
        special = bool(chat.add_special_tokens)
        ids = preparer.text_prompt(prompt.text, special, param=param, as_text=prompt.as_text)
        preparer.check_prompt(ids, param=param)
        return ids

    return await caller.in_thread_if_long(tokenised, max(caller.work_size, len(prompt.text)))


async def chat_text(
    preparer: PromptPreparer, chat: ChatPrompt, *, caller: Caller, config: ServerConfig
) -> RenderedPrompt:
    """Returns the text of a chat's prompt."""
    owner: object = preparer.template
    if chat.chat_template is not None:
        if not config.trust_request_chat_template:
            why = "its operator can set one with --chat-template, or allow it with --trust-request-chat-template"
            raise unsupported_parameter("chat_template", f"is not supported by this server: {why}")
        # One thread for the templates of all requests bounds the number of processes that run at the same time.
        owner = request_template
        make = partial(preparer.with_template, chat.chat_template)
        preparer = await in_thread_of(owner, make, client=caller.work_client)
    variables = _effort(preparer, chat.reasoning_effort) | _other_variables(preparer, chat)

    def rendered(in_process: bool) -> RenderedPrompt:
        return preparer.template.render(
            chat.turns(),
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            tools=[] if chat.tool_rules is None else [tool.for_template() for tool in chat.tools],
            template_kwargs={**config.template_defaults} | variables | chat.chat_template_kwargs,
            control_tokens_in_messages=config.control_tokens_in_messages,
            in_process=in_process,
        )

    return await rendered_prompt(owner, rendered, caller=caller)


def _effort(preparer: PromptPreparer, effort: str | None) -> dict[str, object]:
    """Returns the variables that the chat template has for `reasoning_effort`."""
    if effort is None:
        return {}
    known: dict[str, object] = {"reasoning_effort": effort} if preparer.template.uses("reasoning_effort") else {}
    if effort == "none":
        return known | ({"enable_thinking": False} if preparer.template.uses("enable_thinking") else {})
    if not known:
        log.info("reasoning_effort is ignored: the model's chat template does not use it", extra=ONCE_A_MINUTE)
    return known


def _other_variables(preparer: PromptPreparer, chat: ChatPrompt) -> dict[str, object]:
    """Returns the variables of the chat template for `enable_thinking` and `documents`. Raises `RequestError` for
    documents that the template does not show to the model."""
    variables: dict[str, object] = {}
    if chat.enable_thinking is not None:
        variables["enable_thinking"] = chat.enable_thinking
        if not preparer.template.uses("enable_thinking"):
            log.info("enable_thinking is ignored: the model's chat template does not use it", extra=ONCE_A_MINUTE)
    if chat.documents:
        if not preparer.template.uses("documents"):
            raise unsupported_parameter("documents", "cannot be used: the model's chat template has no documents")
        variables["documents"] = chat.documents
    return variables


def check_answer_format(served: ServedModel, chat: ChatRequest) -> None:
    """Raises `RequestError` if the answers of this model cannot be parsed as the request requires."""
    if served.formats.harmony and not chat.separate_reasoning:
        why = "cannot be false for this model, which has a separate channel for reasoning"
        raise unsupported_parameter("separate_reasoning", why)
    if chat.tool_rules is not None and served.formats.tools is None:
        why = "tool calls are not parsed from this model's answers (see --tool-parser)"
        raise RequestError(f"Invalid 'tools': {why}.", param="tools", code="unsupported_parameter")
    thinking_budget(served, chat.thinking_budget, param=BUDGET_PARAM)


def thinking_budget(served: ServedModel, max_tokens: int | None, *, param: str) -> ThinkingBudget | None:
    """Returns the maximum length of the reasoning, if the request has one. Raises `RequestError` for a model without
    tags that are one token each."""
    if max_tokens is None:
        return None
    reasoning, encode = served.formats.reasoning, partial(served.tokenizer.encode, add_special_tokens=False)
    tags = [] if reasoning is None else [encode(reasoning.opening_tags[0]), encode(reasoning.closing_tags[0])]
    ids = [tag[0] for tag in tags if len(tag) == 1]
    if served.formats.harmony or len(ids) < 2:
        why = "needs a model whose reasoning starts and ends with tags of one token each (see --reasoning-parser)"
        raise unsupported_parameter(param, why)
    return ThinkingBudget(max_tokens, *ids)


def after_thinking(
    form: AnswerForm | None, thinking: Thinking | None, *, budget: ThinkingBudget | None
) -> AnswerForm | None:
    """Returns the form of answers with the reasoning that they can have first; None if they can be any text.
    `thinking`: None if there is no reasoning, or if the prompt has ended it."""
    if form is None and budget is not None:
        form = AnswerForm(Grammar(GrammarKind.LARK, ANY_ANSWER), BUDGET_PARAM)
    if form is None or thinking is None:
        return None if form is None or form.grammar.source == ANY_ANSWER else form
    thinking = msgspec.structs.replace(thinking, budget=budget)
    return form._replace(grammar=msgspec.structs.replace(form.grammar, thinking=thinking))


def answer_format(served: ServedModel, chat: ChatRequest, *, prompt: Sequence[int]) -> AnswerFormat | None:
    """Returns the format of the answers to `prompt`; None if they are content only."""
    rules = chat.tool_rules
    return served.formats.for_request(
        prompt,
        continued=_continued(chat),
        tools=rules,
        forced=_forced_calls(chat, rules) if _has_call_grammar(served, chat) else ForcedCalls.NOWHERE,
        separate_reasoning=chat.separate_reasoning,
    )


def _continued(chat: ChatRequest) -> str:
    """Returns the text of the message that answers continue; empty if they start a message."""
    return chat.messages[-1].text if chat.continue_final_message else ""


async def with_answer_format(options: RouteOptions, chat: ChatRequest, *, prompt: Sequence[int]) -> RouteOptions:
    """Returns the options with the format and the grammar of answers to `prompt`, if there will be answers."""
    if options.context.order is not None:
        return options
    served, rules, caller = options.context.served, chat.tool_rules, options.context.caller

    def form_and_format() -> tuple[AnswerForm | None, AnswerFormat | None]:
        return form_of(chat, options.context), answer_format(served, chat, prompt=prompt)

    size = max(caller.work_size, len(chat.tools) * TOOL_CHARS) if chat.has_form or chat.tools else 0
    form, format = await caller.in_thread_if_long(form_and_format, size)
    options = options if format is None else replace(options, format=format)
    budget = thinking_budget(served, chat.thinking_budget, param=BUDGET_PARAM)
    calls = _has_call_grammar(served, chat)
    form = after_thinking(form, served.formats.thinking(prompt, continued=_continued(chat), calls=calls), budget=budget)
    if form is None:
        return options
    try:
        return await with_grammar(options, form)
    except GrammarError:
        if rules is not None:
            await _check_each(chat, rules, options=options)
        raise


def _has_call_grammar(served: ServedModel, chat: ChatRequest) -> bool:
    """Returns True if the grammar of answers has the calls that `form_of` adds."""
    rules = chat.tool_rules
    if rules is None or served.formats.tools is None:
        return False
    return rules.mode is ToolMode.REQUIRED or chat.form is not None or any(tool.strict for tool in rules.callable)


def _forced_calls(chat: ChatRequest, rules: ToolRules | None) -> ForcedCalls:
    """Returns where the grammar of a request whose answers can have calls allows nothing else."""
    if rules is not None and rules.mode is ToolMode.REQUIRED:
        return ForcedCalls.EVERYWHERE
    return ForcedCalls.AFTER_TAG if chat.form is None else ForcedCalls.OR_JSON


async def _check_each(chat: ChatRequest, rules: ToolRules, *, options: RouteOptions) -> None:
    """Raises `GrammarError` if no grammar can be made of the form alone, or of a tool that can be called."""
    caller = options.context.caller
    if rules.mode is ToolMode.AUTO:
        await with_grammar(options, await caller.in_thread_if_long(lambda: chat.form))
    names = {tool.name for tool in rules.callable}
    for number, tool in enumerate(chat.tools):
        name, param = tool.function.name, f"tools[{number}].function.parameters"
        if name in names:
            source = partial(_parameters, tool, closes_objects=options.context.closes_objects)
            grammar = Grammar(GrammarKind.JSON, await caller.in_thread_if_long(source))
            grammars, called = options.context.served.grammars, f"schema for function '{name}'"
            await grammars.check(grammar, called=called, param=param, client=caller.work_client)
        await asyncio.sleep(0)  # other tasks run


def _parameters(tool: ToolField, *, closes_objects: bool) -> str:
    """Returns the schema of a tool's arguments."""
    source = schema_text(tool.tool().parameters)
    return closed_source(source) if closes_objects else source


def form_of(chat: ChatRequest, context: RequestContext) -> AnswerForm | None:
    """Returns the form of answers: the request's, a tool call, or either. Raises `RequestError` if unsupported."""
    served = context.served
    rules, form, tools = chat.tool_rules, chat.form, served.formats.tools
    if rules is None or tools is None:
        return form
    if chat.response_format is not None and rules.mode is ToolMode.REQUIRED:
        form = None  # the form concerns content, and an answer with a required call has none
    if form is None:
        # A call is required, or one of the tools requires valid calls.
        constrained = rules.mode is ToolMode.REQUIRED or any(tool.strict for tool in rules.callable)
        return _calls(chat, rules, context=context) if constrained else None
    if served.formats.harmony:
        why = "cannot be used together with this model; 'tool_choice' 'none' can"
        raise RequestError(f"'{form.param}' and 'tools' {why}.", param=form.param)
    if form.grammar.kind is not GrammarKind.JSON or rules.mode is ToolMode.REQUIRED:
        why = "can only be used together for JSON with 'tool_choice' 'auto', or with 'tool_choice' 'none'"
        raise RequestError(f"'{form.param}' and 'tools' {why}.", param=form.param)
    calls = _calls(chat, replace(rules, mode=ToolMode.REQUIRED), context=context)
    return _calls_or(form.closed_for(closes_objects=context.closes_objects), calls)


def _calls(chat: ChatRequest, rules: ToolRules, *, context: RequestContext) -> AnswerForm:
    tools, special = context.served.formats.tools, context.served.tokenizer.special_tokens
    assert tools is not None  # checked by `form_of`
    if context.closes_objects:
        closed = [replace(tool, parameters=closed_schema(tool.parameters)) for tool in rules.callable]
        rules = replace(rules, callable=tuple(closed))
    try:
        return AnswerForm(Grammar(GrammarKind.LARK, tools.grammar(rules, special)), "tools")
    except GrammarError:
        numbers = {tool.function.name: number for number, tool in enumerate(chat.tools)}
        for tool in rules.callable:
            try:
                tools.grammar(replace(rules, callable=(tool,)), special)
            except GrammarError as error:
                message = f"Invalid schema for function '{tool.name}': {error.message}."
                raise GrammarError(message, param=f"tools[{numbers[tool.name]}].function.parameters") from error
        raise


def _calls_or(form: AnswerForm, calls: AnswerForm) -> AnswerForm:
    """Returns the form of an answer that is either tool calls in the model's format, or JSON of this form."""
    as_rule = re.sub(r"^start:", "tool_calls:", calls.grammar.source, count=1, flags=re.MULTILINE)
    try:
        schema = msgspec.json.decode(form.grammar.source, type=dict[str, object])
    except msgspec.MsgspecError:
        return form  # the check of the form refuses it, as it does without tools
    source = f"start: requested | tool_calls\nrequested: {json_rule(schema)}\n{as_rule}"
    return AnswerForm(Grammar(GrammarKind.LARK, source), form.param, f"'tools' or '{form.param}'")
