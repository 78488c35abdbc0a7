"""Chat messages to the one text that a model was trained on, by the Jinja template that comes with the model.

The environment (sandbox, filters, functions, the `generation` tag) is what transformers gives its templates, so a
model's template means the same here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from motet.errors import ModelLoadError, RequestError
from motet.text.messages import Message, for_template
from motet.text.tokenizer import Tokenizer
from motet.text.tools.history import with_arguments_read
from motet.text.tools.told import told_in_messages

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template can raise: its own complaints, and plain Python errors from values it did not expect."""
END_MARK = "\ue000MOTET-CONTINUES-HERE\ue000 "
"""Stands for the end of the last message while a template runs; private-use letters, so no message holds it.

Its last character tells whether the template strips the message: then what comes before the mark is stripped too.
"""


class ChatTemplate:
    """The template of one model, or of the user in place of it."""

    def __init__(self, source: str | None, *, named_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `ModelLoadError` if `source` is not Jinja. `named_tokens`: what it may call `bos_token` and so on."""
        self._named_tokens = dict(named_tokens or {})
        self._source = source
        try:
            self._template = None if source is None else _environment().from_string(source)
        except TemplateSyntaxError as exc:
            raise ModelLoadError(f"the chat template is not valid Jinja: line {exc.lineno}: {exc.message}") from exc

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        return cls(tokenizer.chat_template, named_tokens=tokenizer.named_tokens)

    @property
    def source(self) -> str | None:
        return self._source

    def knows(self, variable: str) -> bool:
        """Whether it speaks of a variable of that name."""
        return variable in (self._source or "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """A template that knows no tools gets them, and what was called, in messages.

        Raises `RequestError` naming the field at fault."""
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true; set add_generation_prompt to "
                "false to continue the last message",
                param="continue_final_message",
            )
        if self._source is None or self._template is None:
            raise RequestError(
                "this model has no chat template, so it cannot take chat messages; use /v1/completions, or start the "
                "server with --chat-template",
                param="chat_template",
            )
        plain = for_template(with_arguments_read(messages), knows_developer=self.knows("developer"))
        if not self.knows("tools"):
            plain = told_in_messages(plain, tools or ())
        if continue_final_message:
            plain[-1]["content"] = f"{plain[-1]['content'] or ''}{END_MARK}"
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
    """`{% generation %}...{% endgeneration %}` marks the model's words for training; here its body is plain."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
