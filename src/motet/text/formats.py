"""The formats in which a model marks reasoning and tool calls in its answers.

chat template, --tool-parser, --reasoning-parser ─► ModelFormats ─ for_request ─► AnswerFormat ─► n parsers
once per model                                                     once per request              one per choice
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from motet.errors import ConfigError
from motet.text.answers import CallRules, ForcedCalls, ReasoningRules, ReasoningState, tagged_format
from motet.text.harmony import HARMONY, HARMONY_THINKING, harmony_format
from motet.text.parts import AnswerFormat
from motet.text.reasoning import GPT_OSS, ReasoningTags, tags_named, tags_of_template
from motet.text.tokenizer import Tokenizer
from motet.text.tools.json_formats import DEEPSEEK_V3, DEEPSEEK_V31, HERMES, KIMI_K2, LLAMA3_JSON, LLAMA4_JSON, MISTRAL
from motet.text.tools.python_formats import OLMO3, PYTHONIC
from motet.text.tools.tagged_formats import GLM45, MINIMAX_M2, QWEN3_CODER
from motet.text.tools.tool_format import ToolFormat, ToolRules
from motet.types import Thinking

AUTO: Final = "auto"
NONE: Final = "none"
TAIL = 32
"""Number of tokens at a prompt's end that are searched for an opening or closing tag."""

CHECKED_FIRST: Final = (DEEPSEEK_V3, DEEPSEEK_V31, QWEN3_CODER, GLM45)
"""Formats with more specific template marks than other formats: several formats use `<tool_call>`."""
FORMATS: Final[dict[str, ToolFormat]] = {
    known.name: known
    for known in (*CHECKED_FIRST, HERMES, MISTRAL, KIMI_K2, MINIMAX_M2, PYTHONIC, OLMO3, LLAMA3_JSON, LLAMA4_JSON)
}
"""Formats by name, in the order in which their template marks are checked."""
OTHER_NAMES = {"glm47": "glm45", "granite4": "hermes", "llama4_pythonic": "pythonic", "qwen3_xml": "qwen3_coder"}
"""Additional names of formats for which vLLM has several parsers."""


def format_named(name: str) -> ToolFormat:
    """Returns the format with this name. Raises a `ConfigError` that lists all names."""
    if (found := FORMATS.get(OTHER_NAMES.get(name, name))) is None:
        names = ", ".join(sorted([*FORMATS, *OTHER_NAMES, HARMONY.name]))
        raise ConfigError(f"--tool-parser {name} is unknown; use one of auto, none, {names}")
    return found


def format_of_template(template: str) -> ToolFormat | None:
    """Returns the format that a chat template uses; None if no known format matches."""
    return next((known for known in FORMATS.values() if all(mark in template for mark in known.template_marks)), None)


@dataclass(frozen=True, kw_only=True)
class ParserNames:
    """The operator's parsers for answers. Raises `ConfigError` for unknown names, and if names cannot be combined."""

    tools: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        if self.tools not in (AUTO, NONE, HARMONY.name):
            format_named(self.tools)
        if self.reasoning not in (AUTO, NONE, GPT_OSS):
            tags_named(self.reasoning)
        if self._names_harmony and not {self.tools, self.reasoning} <= {AUTO, NONE, HARMONY.name, GPT_OSS}:
            raise ConfigError(
                f"--tool-parser {self.tools} and --reasoning-parser {self.reasoning} are for different models: gpt-oss "
                "has one format for reasoning and calls; remove one of the two flags"
            )

    @property
    def _names_harmony(self) -> bool:
        return self.tools == HARMONY.name or self.reasoning == GPT_OSS

    def harmony(self, template: str) -> bool:
        """Returns True if answers are in the harmony format, which marks both reasoning and calls."""
        names = {self.tools, self.reasoning}
        is_open = AUTO in names and names <= {AUTO, NONE}
        return self._names_harmony or (is_open and all(mark in template for mark in HARMONY.template_marks))

    def tool_format(self, template: str) -> ToolFormat | None:
        """Returns the format of calls. For a template without tools it is Hermes: the prompt then describes Hermes."""
        if self.tools == AUTO:
            return (format_of_template(template) if "tools" in template else None) or HERMES
        return None if self.tools == NONE else format_named(self.tools)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        if self.reasoning == AUTO:
            return tags_of_template(template)
        return None if self.reasoning == NONE else tags_named(self.reasoning)


@dataclass(frozen=True, kw_only=True)
class ModelFormats:
    """The formats of one model's reasoning and tool calls."""

    tokenizer: Tokenizer
    reasoning: ReasoningTags | None = None
    """Tags of reasoning; None if reasoning is not parsed."""
    tools: ToolFormat | None = None
    """Format of tool calls; None if calls are not parsed."""
    harmony: bool = False
    """True if answers are messages on channels (gpt-oss). Reasoning is then always parsed."""
    tools_named: bool = False
    """True if the operator has named the format of tool calls."""

    @property
    def reasons(self) -> bool:
        """True if the model's answers can have reasoning."""
        return self.harmony or self.reasoning is not None

    @property
    def must_parse(self) -> bool:
        """True if answers must not be shown without being parsed, as in vLLM with parsers: they can have reasoning, or
        the operator expects tool calls."""
        return self.reasons or self.tools_named

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str | None, *, names: ParserNames | None = None) -> "ModelFormats":
        """`template`: source of the chat template. `names`: if None, the template determines the formats."""
        names, template = names or ParserNames(), template or ""
        if names.harmony(template):
            return cls(tokenizer=tokenizer, tools=None if names.tools == NONE else HARMONY, harmony=True)
        return cls(
            tokenizer=tokenizer,
            reasoning=names.reasoning_tags(template),
            tools=names.tool_format(template),
            tools_named=names.tools not in (AUTO, NONE),
        )

    def for_request(
        self,
        prompt: Sequence[int],
        *,
        continued: str = "",
        tools: ToolRules | None = None,
        forced: ForcedCalls = ForcedCalls.NOWHERE,
        separate_reasoning: bool = True,
    ) -> AnswerFormat | None:
        """Returns the format of the answers to one chat prompt; None if answers are content only. `continued`: text of
        the assistant message that the answers continue; empty if they start a message. `tools`: None if no tool may be
        called. `forced`: where the grammar of the request allows only calls. Without `separate_reasoning`, reasoning is
        part of the content, but its tokens are counted."""
        calls = None
        if self.tools is not None and tools is not None:
            calls = CallRules(self.tools, tools.callable, tools.parallel, forced)
        if self.harmony:
            return harmony_format(calls, self._special_in_calls)
        at_start, tags = self._reasoning_state(prompt, continued), self.reasoning
        if calls is None and at_start is ReasoningState.ENDED and not (tags and tags.content_tags):
            return None
        reasoning = None if tags is None else ReasoningRules(tags, at_start, separate_reasoning)
        visible = self._special_in_reasoning | (self._special_in_calls if calls else frozenset())
        return tagged_format(reasoning, calls, visible=visible)

    def thinking(self, prompt: Sequence[int], *, continued: str = "", calls: bool = False) -> Thinking | None:
        """Returns the reasoning that an answer to this prompt can have before a grammar applies. None if there is no
        reasoning, or if the grammar itself allows it: in harmony, a grammar of `calls` does."""
        if self.harmony:
            return None if calls else HARMONY_THINKING
        state = self._reasoning_state(prompt, continued)
        if self.reasoning is None or state is ReasoningState.ENDED:
            return None
        opened = state is not ReasoningState.POSSIBLE
        return Thinking(self.reasoning.opening_tags[0], self.reasoning.closing_tags[0], opened)

    def _reasoning_state(self, prompt: Sequence[int], continued: str) -> ReasoningState:
        if self.reasoning is None:
            return ReasoningState.ENDED
        opens, closes = self.reasoning.opening_tags, self.reasoning.closing_tags
        if message := continued.strip():
            if not message.startswith(opens) or any(tag in message for tag in closes):
                return ReasoningState.ENDED
            return ReasoningState.OPENED if message.endswith(opens) else ReasoningState.STARTED
        tail = self.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(opens):
            return ReasoningState.OPENED
        return ReasoningState.ENDED if tail.endswith(closes) else ReasoningState.POSSIBLE

    @cached_property
    def _special_in_reasoning(self) -> frozenset[int]:
        tags = self.reasoning
        return self._special_tokens_in((*tags.opening_tags, *tags.closing_tags, *tags.content_tags) if tags else ())

    @cached_property
    def _special_in_calls(self) -> frozenset[int]:
        form = HARMONY if self.harmony else self.tools
        return self._special_tokens_in((*form.opening_tags, *form.inner_tags, *form.closing_tags) if form else ())

    def _special_tokens_in(self, tags: Sequence[str]) -> frozenset[int]:
        """Returns the special tokens that are a tag or a part of a tag."""
        special = self.tokenizer.special_tokens.items()
        return frozenset(token_id for text, token_id in special if text and any(text in tag for tag in tags))
