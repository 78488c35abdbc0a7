"""Turns chat messages into the text form on which a model was trained, with the model's Jinja template.

1. The arguments of earlier calls become objects, as templates expect.
2. Texts of control tokens in the messages, the tools and the variables of the client are marked (`client_texts`).
3. For a template without tools, tools and earlier calls become text in messages.
4. The template is rendered: a short prompt in this process, if the template uses only operations that are known to be
   cheap (`jinja`), and every other prompt in a process with limits of time and memory (`render_process`). The result
   is the same.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from jinja2 import TemplateSyntaxError

from motet.errors import ModelLoadError, RequestError
from motet.text.rendering.client_texts import ClientTexts, RenderedPrompt, without_marks
from motet.text.rendering.control_tokens import ControlTokens
from motet.text.rendering.jinja import TEMPLATE_ERRORS, Arguments, MeteredTemplate, NeedsProcess, metered
from motet.text.rendering.render_process import RenderError, RenderProcess, marshalled, render_process
from motet.text.tokenizer import Tokenizer
from motet.text.tools.json_formats import HERMES_BEGIN, HERMES_END

Message = Mapping[str, object]
"""A message of a conversation: its role, its content as a string, and optional fields, all checked by the API."""
MAX_BYTES_HERE = 2**14
"""Maximum size of the messages and other variables of a prompt that is rendered in this process."""
END_MARK = "\ue000MOTET-CONTINUES-HERE\ue000 "
"""Marks the end of the last message while a template is rendered. The first character is for private use, so no message
contains it. If its last character, a space, is missing afterwards, the template strips messages: then the text of the
message is stripped too."""
BLANK_MARK = f" {END_MARK}"
"""Takes the place of a last message that is empty or blank. If the template strips messages, the prompt ends before the
mark: the line break that ends the header of the turn is not the message's."""


class ChatTemplate:
    """The chat template of a model, or the template that the operator set instead."""

    def __init__(
        self,
        source: str | None,
        *,
        named_tokens: Mapping[str, str] | None = None,
        control: ControlTokens | None = None,
        process: RenderProcess | None = None,
    ) -> None:
        """Raises `ModelLoadError` if `source` is not valid Jinja. `named_tokens`: texts of `bos_token` and so on.
        `control`: the control tokens that only the template can write; None if messages can have them too. `process`:
        renders every prompt, as for a template of a client; None to share a process and render short prompts here."""
        self._named_tokens = dict(named_tokens or {})
        self.source = source
        self._process: RenderProcess | None = process or (None if source is None else render_process(source))
        try:
            self._template: MeteredTemplate | None = None if source is None or process else metered(source)
        except NeedsProcess:
            self._template = None
        except TemplateSyntaxError as exc:
            raise ModelLoadError(f"the chat template is not valid Jinja: line {exc.lineno}: {exc.message}") from exc
        self._client_texts = None if control is None else ClientTexts(control, source or "")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        return cls(tokenizer.chat_template, named_tokens=tokenizer.named_tokens, control=tokenizer.control_tokens)

    @classmethod
    def of_request(cls, source: str, tokenizer: Tokenizer) -> "ChatTemplate":
        """Returns the template that a request brought. Raises `RequestError` if it is not valid Jinja."""
        named, control, process = tokenizer.named_tokens, tokenizer.control_tokens, RenderProcess(source)
        try:
            return cls(source, named_tokens=named, control=control, process=process)
        except (TemplateSyntaxError, RecursionError) as exc:
            message = f"Invalid 'chat_template': it is not valid Jinja: {exc}."
            raise RequestError(message, param="chat_template", code="invalid_value") from exc

    def uses(self, variable: str) -> bool:
        """Returns True if the template contains a variable of this name."""
        return variable in (self.source or "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        control_tokens_in_messages: bool = False,
        in_process: bool | None = None,
    ) -> RenderedPrompt:
        """Returns the prompt. `in_process`: True to render it in the process of the template and wait, False to raise
        `NeedsProcess` instead, within 50 ms; None to use the process only if it is needed. Raises a `RequestError`
        that names the invalid field, or the limit that the template exceeds. With `control_tokens_in_messages`, texts
        of control tokens in what the client sent are control tokens."""
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true; set add_generation_prompt to "
                "false to continue the last message",
                param="continue_final_message",
            )
        if self._process is None:
            raise RequestError(
                "this model has no chat template, so it does not support chat messages; use /v1/completions, or start "
                "the server with --chat-template",
                param="chat_template",
            )
        sent: dict[str, Any] = {"tools": list(tools or ()), "more": dict(template_kwargs or {})}
        sent["messages"] = plain_messages(messages, has_developer=self.uses("developer"))
        given, texts = sent, None if control_tokens_in_messages else self._client_texts
        if texts is not None:
            sent = texts.marked(given)
        plain, tools = sent["messages"], sent["tools"]
        if not self.uses("tools"):
            plain = with_tools_as_text(plain, tools)
        last = str(plain[-1]["content"]) if continue_final_message else ""
        if continue_final_message:
            plain = [*plain[:-1], {**plain[-1], "content": f"{last}{END_MARK}" if last.strip() else BLANK_MARK}]
        variables = {**self._named_tokens, "tools": tools or None, "documents": None, **sent["more"]}
        variables |= {"messages": plain, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._text(variables, in_process)
        except (*TEMPLATE_ERRORS, RenderError) as exc:
            why = without_marks(str(exc))
            raise RequestError(f"the chat template rejects these messages: {why}", param="messages") from exc
        text = _until_mark(text, last) if continue_final_message else text
        return RenderedPrompt(text) if texts is None else texts.prompt(text, is_marked=sent is not given)

    def _text(self, variables: dict[str, Any], in_process: bool | None) -> str:
        assert self._process is not None
        request = marshalled(variables)
        if self._template is not None and not in_process and len(request) <= MAX_BYTES_HERE:
            try:
                return self._template.render(variables)
            except NeedsProcess:
                pass
        if in_process is False:
            raise NeedsProcess
        return self._process.render(request)


def _until_mark(text: str, last: str) -> str:
    """Returns the text up to the end of the last message, whose content is `last`."""
    if (end := text.rfind(END_MARK.rstrip())) < 0:
        raise RequestError(
            "the chat template changes the last message, so it cannot be continued", param="continue_final_message"
        )
    stripped = not text.startswith(END_MARK, end)
    if last.strip():
        return text[:end].rstrip() if stripped else text[:end]
    start = end - 1  # of the mark's first space
    if start < 0 or text[start] != " ":
        return text[:end]
    return text[:start] if stripped else text[:start] + last


def plain_messages(messages: Sequence[Message], *, has_developer: bool = True) -> list[dict[str, object]]:
    """Returns copies of messages: arguments of calls become objects, and reasoning has both of its names. Without
    `has_developer`, the role `developer` becomes `system`. Raises a `RequestError` that names the invalid field."""
    if not messages:
        raise RequestError("messages is empty; at least one message is needed", param="messages")
    plain = [dict(message) for message in messages]
    for i, message in enumerate(plain):
        if message["role"] == "developer" and not has_developer:
            message["role"] = "system"
        if reasoning := message.get("reasoning_content"):
            message["reasoning"] = reasoning  # Qwen's templates use the longer name, gpt-oss's the shorter one
        if isinstance(calls := message.get("tool_calls"), Sequence):
            param = f"messages[{i}].tool_calls[{{}}].function.arguments"
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments(call["function"], param.format(j))}}
                for j, call in enumerate(calls)
            ]
    return plain


def _arguments(function: Mapping[str, object], param: str) -> "Arguments":
    """Returns the arguments as an object. An empty string, which some models generate, means no arguments."""
    if isinstance(value := function["arguments"], Mapping):
        return Arguments(value)
    try:
        parsed = json.loads(str(value).strip() or "{}")
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"{param} is not valid JSON: {exc}", param=param) from exc
    if not isinstance(parsed, dict):
        raise RequestError(f"{param} is JSON, but not an object", param=param)
    return Arguments(parsed)


# For a chat template without tools, a system message describes the tools in the words of Hermes and Qwen. Earlier calls
# and results are added to messages in the same way, so the template gets only plain text.
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


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Returns messages without roles and fields for tools. The first system message, or a new one, describes the tools.
    Consecutive results of calls become one message of the user. `messages` have arguments as objects; `tools` are as
    the client sent them."""
    plain: list[dict[str, object]] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = "\n".join(f"{RESULT}\n{message['content']}\n{RESULT_END}" for message in group)
            plain.append({"role": "user", "content": results})
        else:
            plain += map(_with_calls_as_text, group)
    if tools:
        text = INTRODUCTION + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + HOW_TO_CALL
        has_system_message = bool(plain) and plain[0]["role"] in ("system", "developer")
        first = plain.pop(0) if has_system_message else {"role": "system", "content": ""}
        plain.insert(0, {**first, "content": f"{first['content']}\n\n{text}".lstrip()})
    return plain


def _with_calls_as_text(message: Message) -> dict[str, object]:
    content = str(message["content"])
    if isinstance(calls := message.get("tool_calls"), Sequence):
        functions = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        texts = [f"{HERMES_BEGIN}\n{function}\n{HERMES_END}" for function in functions]
        content = "\n".join([content, *texts]).removeprefix("\n")
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
