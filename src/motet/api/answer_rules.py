"""How the answers to a chat are read, and what they must be where tools ask for it."""

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from motet.api.plan import Wanted
from motet.api.schema_chat import ChatRequest
from motet.api.schema_shared import schema_text
from motet.api.schema_structured import Form
from motet.api.served import ServedModel
from motet.constraint import Grammar, GrammarKind
from motet.errors import GrammarError, RequestError
from motet.text.tokenizer import Tokenizer
from motet.text.tools.base import ToolFormat, ToolMode, ToolRules
from motet.text.tools.lark import json_rule


def check_reading(served: ServedModel, chat: ChatRequest) -> None:
    """Raises `RequestError` if answers are to be read in a way in which this model's are not."""
    if served.formats.harmony and not chat.separate_reasoning:
        raise RequestError(
            "Unsupported parameter: 'separate_reasoning' cannot be false for this model, which thinks on a channel of "
            "its own.",
            param="separate_reasoning",
            code="unsupported_parameter",
        )
    if chat.tool_rules is not None and served.formats.tools is None:
        raise RequestError(
            "Invalid 'tools': calls of tools are not read from this model's answers (see --tool-parser).",
            param="tools",
            code="unsupported_parameter",
        )


async def with_answer_rules(wanted: Wanted, chat: ChatRequest, prompt: Sequence[int]) -> Wanted:
    """`wanted`, told how answers to `prompt` are read and what they must be. Nothing where only the prompt is wanted.
    Raises `RequestError`."""
    if wanted.kv_params.order is not None:
        return wanted
    formats, rules = wanted.served.formats, chat.tool_rules
    begun = chat.messages[-1].text if chat.continue_final_message else ""
    read = replace(
        wanted,
        format=formats.for_request(prompt, begun=begun, tools=rules, separate_reasoning=chat.separate_reasoning),
    )
    form = form_of(chat, wanted.served)
    if form is None:
        return read
    thinking = formats.thinking(prompt, begun=begun, calls=form != chat.form)
    try:
        return await held_to(read, form._replace(grammar=msgspec.structs.replace(form.grammar, thinking=thinking)))
    except GrammarError:
        if rules is not None:
            await _check_each(chat, rules, read)
        raise


async def _check_each(chat: ChatRequest, rules: ToolRules, wanted: Wanted) -> None:
    """Raises `GrammarError` for the form, or the first tool that may be called whose parameters, cannot be held to by
    themselves."""
    if rules.mode is ToolMode.AUTO:
        await held_to(wanted, chat.form)
    names = {tool.name for tool in rules.callable}
    for number, tool in enumerate(chat.tools):
        name, param = tool.function.name, f"tools[{number}].function.parameters"
        if name in names:
            grammar = Grammar(GrammarKind.JSON, schema_text(tool.tool().parameters, param))
            await wanted.served.grammars.check(grammar, called=f"schema for function '{name}'", param=param)


async def held_to(wanted: Wanted, form: Form | None) -> Wanted:
    """`wanted`, with answers of this form, which can be compiled. Raises `RequestError`."""
    if form is None or wanted.kv_params.order is not None:
        return wanted
    param = wanted.param + form.param
    await wanted.served.grammars.check(form.grammar, called=form.called or f"'{param}'", param=param)
    return replace(wanted, grammar=form.grammar)


def form_of(chat: ChatRequest, served: ServedModel) -> Form | None:
    """What an answer must be: as it is asked for, or a call, or either. Raises `RequestError` where that cannot be."""
    rules, asked, tools = chat.tool_rules, chat.form, served.formats.tools
    if rules is None or tools is None:
        return asked
    if chat.response_format is not None and rules.mode is ToolMode.REQUIRED:
        asked = None  # it is about content, of which there will be none
    if asked is None:
        return _calls(tools, rules, served.tokenizer) if _is_constrained(rules) else None
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
    return _calls_or(asked, _calls(tools, replace(rules, mode=ToolMode.REQUIRED), served.tokenizer))


def _calls(tools: ToolFormat, rules: ToolRules, tokenizer: Tokenizer) -> Form:
    try:
        source = tools.grammar(rules, tokenizer.special_tokens)
    except GrammarError as error:
        raise GrammarError(f"Invalid 'tools': {error.message}.", param="tools") from error
    return Form(Grammar(GrammarKind.LARK, source), "tools")


def _calls_or(asked: Form, calls: Form) -> Form:
    """Calls in the model's own way, or JSON as it was asked for, laid out as calls are."""
    as_rule = re.sub(r"^start:", "tool_calls:", calls.grammar.source, count=1, flags=re.MULTILINE)
    try:
        schema = msgspec.json.decode(asked.grammar.source, type=dict[str, object])
    except msgspec.MsgspecError:
        return asked  # to be refused as it would be without tools
    source = f"start: asked_for | tool_calls\nasked_for: {json_rule(schema)}\n{as_rule}"
    return Form(Grammar(GrammarKind.LARK, source), asked.param, "'tools' or 'response_format'")


def _is_constrained(rules: ToolRules) -> bool:
    """Where a call must be, or one of the tools wants nothing but valid ones."""
    return rules.mode is ToolMode.REQUIRED or any(tool.strict for tool in rules.callable)
