"""How a model marks thoughts and tool calls in its answers: found out once for each model, used by each request.

chat template, --tool-parser, --reasoning-parser ─► ModelFormats ─ for_request ─► AnswerFormat ─► n parsers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from motet.errors import ConfigError
from motet.text.answers import CallRules, ReasoningRules, ReasoningState, tagged_format
from motet.text.harmony import HARMONY, THOUGHT, harmony_format
from motet.text.parts import AnswerFormat
from motet.text.reasoning import GPT_OSS, ReasoningTags, tags_known_by, tags_named
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

FORMATS: Final[dict[str, ToolFormat]] = {
    tool_format.name: tool_format
    for tool_format in (
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        QWEN3_CODER,
        GLM45,
        HERMES,
        MISTRAL,
        KIMI_K2,
        MINIMAX_M2,
        PYTHONIC,
        OLMO3,
        LLAMA3_JSON,
        LLAMA4_JSON,
    )
}
"""Formats by name. Those whose marks in a template are more special come first: `<tool_call>` is not only Hermes'."""
OTHER_NAMES = {"glm47": "glm45", "granite4": "hermes", "llama4_pythonic": "pythonic", "qwen3_xml": "qwen3_coder"}
"""Other names of a format, where vLLM has several parsers for it."""


def format_named(name: str) -> ToolFormat:
    """Raises `ConfigError`, which lists all names."""
    found = FORMATS.get(OTHER_NAMES.get(name, name))
    if found is None:
        names = ", ".join(sorted([*FORMATS, *OTHER_NAMES, HARMONY.name]))
        raise ConfigError(f"--tool-parser {name} is unknown; there are auto, none, {names}")
    return found


def format_known_by(template: str) -> ToolFormat | None:
    """Returns the format that a chat template is for; None if it is for none that is known."""
    return next((known for known in FORMATS.values() if all(mark in template for mark in known.known_by)), None)


@dataclass(frozen=True, kw_only=True)
class ParserNames:
    """The operator's choice of how answers are read. Raises `ConfigError` for unknown names and two that do not fit."""

    tools: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        if self.tools not in (AUTO, NONE, HARMONY.name):
            format_named(self.tools)
        if self.reasoning not in (AUTO, NONE, GPT_OSS):
            tags_named(self.reasoning)
        if self._in_harmony and not {self.tools, self.reasoning} <= {AUTO, NONE, HARMONY.name, GPT_OSS}:
            raise ConfigError(
                f"--tool-parser {self.tools} and --reasoning-parser {self.reasoning} are for different models: gpt-oss "
                "marks thoughts and calls in one way of its own; leave one of them out"
            )

    @property
    def _in_harmony(self) -> bool:
        return self.tools == HARMONY.name or self.reasoning == GPT_OSS

    def harmony(self, template: str) -> bool:
        """Returns True if answers are written in harmony, which marks thoughts and calls in one way."""
        names = {self.tools, self.reasoning}
        is_open = AUTO in names and names <= {AUTO, NONE}
        return self._in_harmony or (is_open and all(mark in template for mark in HARMONY.known_by))

    def tool_format(self, template: str) -> ToolFormat | None:
        """Returns the format of calls; Hermes' for a template without tools, since the prompt then asks for it."""
        if self.tools == AUTO:
            return (format_known_by(template) if "tools" in template else None) or HERMES
        return None if self.tools == NONE else format_named(self.tools)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        if self.reasoning == AUTO:
            return tags_known_by(template)
        return None if self.reasoning == NONE else tags_named(self.reasoning)


@dataclass(frozen=True, kw_only=True)
class ModelFormats:
    """How one model writes its thoughts and its calls of tools."""

    tokenizer: Tokenizer
    reasoning: ReasoningTags | None = None
    """None: thoughts are not told apart."""
    tools: ToolFormat | None = None
    """None: calls are not read."""
    harmony: bool = False
    """True if answers are messages on channels, as gpt-oss writes them; thoughts are always told apart."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str | None, *, names: ParserNames | None = None) -> "ModelFormats":
        """`template`: the source of the chat template in use. `names`: None for what the template is known by."""
        names, template = names or ParserNames(), template or ""
        if names.harmony(template):
            return cls(tokenizer=tokenizer, tools=None if names.tools == NONE else HARMONY, harmony=True)
        return cls(tokenizer=tokenizer, reasoning=names.reasoning_tags(template), tools=names.tool_format(template))

    def for_request(
        self, prompt: Sequence[int], *, begun: str = "", tools: ToolRules | None = None, separate_reasoning: bool = True
    ) -> AnswerFormat | None:
        """Returns how the answers to one chat prompt are read; None if they are shown as they are.

        `begun`: the message that is continued, if one is. `tools`: None where none may be called. Without
        `separate_reasoning` thoughts are shown as content, but still counted.
        """
        calls = None
        if self.tools is not None and tools is not None:
            calls = CallRules(self.tools, tools.callable, tools.parallel)
        if self.harmony:
            return harmony_format(calls, self._seen_in_calls)
        at_start, tags = self._thought_state(prompt, begun), self.reasoning
        if calls is None and at_start is ReasoningState.ENDED and not (tags and tags.around_answer):
            return None
        thoughts = None if tags is None else ReasoningRules(tags, at_start, separate_reasoning)
        visible = self._seen_in_thoughts | (self._seen_in_calls if calls else frozenset())
        return tagged_format(thoughts, calls, visible=visible)

    def thinking(self, prompt: Sequence[int], *, begun: str = "", calls: bool = False) -> Thinking | None:
        """Returns what an answer to this prompt may write before a grammar begins. None: nothing, or the grammar itself
        allows it, as a grammar of `calls` does in harmony."""
        if self.harmony:
            return None if calls else THOUGHT
        thought = self._thought_state(prompt, begun)
        if self.reasoning is None or thought is ReasoningState.ENDED:
            return None
        opened = thought is not ReasoningState.POSSIBLE
        return Thinking(self.reasoning.opens[0], self.reasoning.closes[0], opened)

    def _thought_state(self, prompt: Sequence[int], begun: str) -> ReasoningState:
        """Returns where an answer stands when the prompt ends."""
        if self.reasoning is None:
            return ReasoningState.ENDED
        opens, closes = self.reasoning.opens, self.reasoning.closes
        if written := begun.strip():
            if not written.startswith(opens) or any(tag in written for tag in closes):
                return ReasoningState.ENDED
            return ReasoningState.OPENED if written.endswith(opens) else ReasoningState.STARTED
        tail = self.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(opens):
            return ReasoningState.OPENED
        return ReasoningState.ENDED if tail.endswith(closes) else ReasoningState.POSSIBLE

    @cached_property
    def _seen_in_thoughts(self) -> frozenset[int]:
        tags = self.reasoning
        return frozenset() if tags is None else self._special((*tags.opens, *tags.closes, *tags.around_answer))

    @cached_property
    def _seen_in_calls(self) -> frozenset[int]:
        form = HARMONY if self.harmony else self.tools
        return frozenset() if form is None else self._special((*form.begins, *form.inner, *form.ends))

    def _special(self, tags: Sequence[str]) -> frozenset[int]:
        """Returns the special tokens that are a tag or a part of one."""
        special = self.tokenizer.special_tokens.items()
        return frozenset(token_id for text, token_id in special if text and any(text in tag for tag in tags))
