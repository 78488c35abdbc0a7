"""The part of a chat that determines how its answers are read, without the messages: vLLM's `parse_context`.

/v1/chat/completions/render ─► parse_context ─► /inference/v1/generate with `output_mode: "derender"`
"""

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from motet.api.http.schema import UNICODE, Schema
from motet.api.openai.chat_schema import (
    ChatRequest,
    ToolChoice,
    ToolChoiceField,
    ToolFields,
    check_tools,
    tool_rules_of,
)
from motet.api.served import ServedModel
from motet.text.answers import ForcedCalls
from motet.text.parts import AnswerFormat
from motet.text.tools.tool_format import ToolMode, ToolRules

MAX_CONTINUED_CHARS = 2**20


class ParseContext(Schema):
    ignored = frozenset({"chat_template_kwargs", "history_tool_call_cnt"})
    """Fields that only vLLM's parsers read. Motet's parsers read the prompt, and make random ids."""

    tools: ToolFields = Field(default_factory=list)
    tool_choice: ToolChoiceField = ToolChoice(type="none")
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True
    continued_text: Annotated[str, UNICODE, Field(max_length=MAX_CONTINUED_CHARS)] = ""
    """Text of the message that the answers continue; empty if they start a message. vLLM does not have this field."""
    json_or_calls: bool = False
    """True if an answer is either JSON or tool calls. vLLM does not have this field."""

    @model_validator(mode="after")
    def check_tool_fields(self) -> Self:
        check_tools(self.tools, self.tool_choice)
        return self

    @property
    def tool_rules(self) -> ToolRules | None:
        return tool_rules_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def answer_format(self, served: ServedModel, prompt: Sequence[int], *, has_grammar: bool) -> AnswerFormat | None:
        """Returns the format of the answers to `prompt`; None if they are content only. `has_grammar`: True if a
        grammar makes the answers follow the tool choice."""
        rules, forced = self.tool_rules, ForcedCalls.NOWHERE
        if rules is not None and has_grammar:
            forced = ForcedCalls.OR_JSON if self.json_or_calls else ForcedCalls.AFTER_TAG
            forced = ForcedCalls.EVERYWHERE if rules.mode is ToolMode.REQUIRED else forced
        return served.formats.for_request(
            prompt,
            continued=self.continued_text,
            tools=rules,
            forced=forced,
            separate_reasoning=self.separate_reasoning,
        )


def context_of(chat: ChatRequest) -> dict[str, object]:
    """Returns the parse context of a chat, with fields that vLLM does not have only where they matter."""
    choice = chat.tool_choice or ToolChoice(type="auto" if chat.tools else "none")
    plain = choice.function is None and choice.allowed_tools is None
    context: dict[str, object] = {
        "tools": [tool.model_dump(exclude_unset=True) for tool in chat.tools] or None,
        "tool_choice": choice.type if plain else choice.model_dump(exclude_none=True),
        "parallel_tool_calls": chat.parallel_tool_calls,
        "include_reasoning": chat.include_reasoning,
    }
    if not chat.separate_reasoning:
        context["separate_reasoning"] = False
    if chat.continue_final_message:
        context["continued_text"] = chat.messages[-1].text
    if chat.tools and chat.form is not None:
        context["json_or_calls"] = True
    return context
