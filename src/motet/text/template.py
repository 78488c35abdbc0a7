"""Turns chat messages into the text that a model was trained on, with the model's Jinja template.

1. Arguments of earlier calls become objects, as templates expect it.
2. A template that knows no tools gets tools and earlier calls as messages.
3. The template is rendered. Its environment (sandbox, filters, functions, the `generation` tag) is what transformers
   gives its templates, so a model's template means the same here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from motet.errors import ModelLoadError, RequestError
from motet.text.tokenizer import Tokenizer
from motet.text.tools.json_formats import HERMES_BEGIN, HERMES_END

Message = Mapping[str, object]
"""One message of a conversation: its role, its content as a string, and maybe more, all checked by the API."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""All that a template can raise: its own errors, and Python's errors for values that it did not expect."""

END_MARK = "\ue000MOTET-CONTINUES-HERE\ue000 "
"""Stands for the end of the last message while a template runs. Its first character is for private use, so no message
has it. If its last character is missing, the template strips messages, and the text before the mark is stripped too."""


class ChatTemplate:
    """The chat template of a model, or the operator's in its place."""

    def __init__(self, source: str | None, *, named_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `ModelLoadError` if `source` is not Jinja. `named_tokens`: the texts of `bos_token` and so on."""
        self._named_tokens = dict(named_tokens or {})
        self.source = source
        try:
            self._template = None if source is None else _compiled(source)
        except TemplateSyntaxError as exc:
            raise ModelLoadError(f"the chat template is not valid Jinja: line {exc.lineno}: {exc.message}") from exc

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        return cls(tokenizer.chat_template, named_tokens=tokenizer.named_tokens)

    def knows(self, variable: str) -> bool:
        """Returns True if the template uses a variable of that name."""
        return variable in (self.source or "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Raises `RequestError` naming the field at fault."""
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true; set add_generation_prompt to "
                "false to continue the last message",
                param="continue_final_message",
            )
        if self._template is None:
            raise RequestError(
                "this model has no chat template, so it cannot take chat messages; use /v1/completions, or start the "
                "server with --chat-template",
                param="chat_template",
            )
        plain = plain_messages(messages, knows_developer=self.knows("developer"))
        if not self.knows("tools"):
            plain = with_tools_in_words(plain, tools or ())
        if continue_final_message:
            plain[-1]["content"] = f"{plain[-1]['content']}{END_MARK}"
        variables = {
            **self._named_tokens,
            "tools": tools or None,
            "documents": None,
            **(template_kwargs or {}),
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except TEMPLATE_ERRORS as exc:
            raise RequestError(f"the chat template does not take these messages: {exc}", param="messages") from exc
        return _until_mark(text) if continue_final_message else text


def _until_mark(text: str) -> str:
    end = text.rfind(END_MARK.rstrip())
    if end < 0:
        raise RequestError(
            "the chat template does not show the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(END_MARK, end) else text[:end].rstrip()


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's words for training; here its body replaces it."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _compiled(source: str) -> Template:
    """Models that come again, or that share a template, share what was made of it."""
    template = _environment().from_string(source)
    template.globals = dict(template.globals)  # a ChainMap, which every rendering would go through
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(  # sizes: templates may give these by place
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def plain_messages(messages: Sequence[Message], *, knows_developer: bool = True) -> list[dict[str, object]]:
    """Copies messages, with objects for the arguments of calls, reasoning under both of its names, and role `developer`
    as `system` where the template needs it. Raises `RequestError` naming the field at fault."""
    if not messages:
        raise RequestError("messages is empty; at least one message is needed", param="messages")
    plain = [dict(message) for message in messages]
    for i, message in enumerate(plain):
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
        if reasoning := message.get("reasoning_content"):
            message["reasoning"] = reasoning  # Qwen's templates read the longer name, gpt-oss's read this one
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence):
            param = f"messages[{i}].tool_calls[{{}}].function.arguments"
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments(call["function"], param.format(j))}}
                for j, call in enumerate(calls)
            ]
    return plain


def _arguments(function: Mapping[str, object], param: str) -> "Arguments":
    """Returns the arguments as an object; an empty string, which some models write, means none."""
    written = function["arguments"]
    if isinstance(written, Mapping):
        return Arguments(written)
    try:
        read = json.loads(str(written).strip() or "{}")
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"{param} is no valid JSON: {exc}", param=param) from exc
    if not isinstance(read, dict):
        raise RequestError(f"{param} is JSON, but not of an object", param=param)
    return Arguments(read)


class Arguments(dict[str, object]):
    """The arguments of an earlier call, an object that is JSON where a template writes it as a string.

    Clients send arguments as OpenAI does, as a string of JSON; templates go through them as an object or write them
    with `tojson`, which would quote a string once more. So, as in transformers and vLLM, templates get the object.
    The templates of DeepSeek V3 add it to strings with `+`.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, behind: str) -> str:
        return f"{self}{behind}"

    def __radd__(self, before: str) -> str:
        return f"{before}{self}"


# If a chat template knows no tools, they are described in a system message, in the words that Hermes and Qwen use.
# Earlier calls and results are written into messages the same way, so the template sees only plain text.
INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TAGS = f"{HERMES_BEGIN}{HERMES_END}"
HOW_TO_CALL = f"""
</tools>

For each function call, return a json object with function name and arguments within {_TAGS} XML tags:
{HERMES_BEGIN}
{{"name": <function-name>, "arguments": <args-json-object>}}
{HERMES_END}"""
RESULT, RESULT_END = "<tool_response>", "</tool_response>"


def with_tools_in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Returns messages without roles and fields for tools: tools stand in the first system message, or in a new one.

    `messages` have arguments as objects; `tools` are as the client sent them. Results of calls become messages of the
    user; those that follow one another become one message.
    """
    plain: list[dict[str, object]] = []
    for message in messages:
        calls, content = message.get("tool_calls"), str(message["content"])
        if message["role"] == "tool":
            content = f"{RESULT}\n{content}\n{RESULT_END}"
            if plain and plain[-1]["role"] == "user" and str(plain[-1]["content"]).startswith(RESULT):
                content = f"{plain.pop()['content']}\n{content}"
            plain.append({"role": "user", "content": content})
            continue
        if isinstance(calls, Sequence):
            told = [f"{HERMES_BEGIN}\n{json.dumps(one['function'], ensure_ascii=False)}\n{HERMES_END}" for one in calls]
            content = "\n".join([content, *told]).removeprefix("\n")
        plain.append({**message, "content": content})
        plain[-1].pop("tool_calls", None)
    if tools:
        text = INTRODUCTION + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + HOW_TO_CALL
        told_before = bool(plain) and plain[0]["role"] in ("system", "developer")
        first = plain.pop(0) if told_before else {"role": "system", "content": ""}
        plain.insert(0, {**first, "content": f"{first['content']}\n\n{text}".lstrip()})
    return plain
