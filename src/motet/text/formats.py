"""What a model's answers are written in: made once for each model, asked by each request.

chat template, --tool-parser, --reasoning-parser ─► ModelFormats ─ for_request ─► AnswerFormat ─► n parsers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from motet.constraint import Thinking
from motet.errors import ConfigError
from motet.text.answers import TaggedFormat, Thought, Thoughts, Tools
from motet.text.parts import AnswerFormat
from motet.text.reasoning import GPT_OSS, ReasoningTags, tags_known_by, tags_named
from motet.text.tokenizer import Tokenizer
from motet.text.tools.base import ToolFormat, ToolRules
from motet.text.tools.formats import format_known_by, format_named
from motet.text.tools.harmony import HARMONY, THOUGHT
from motet.text.tools.hermes import HERMES

AUTO: Final = "auto"
NONE: Final = "none"
TAIL = 32
"""Tokens at a prompt's end that may be an opening or closing tag and white space."""


@dataclass(frozen=True, kw_only=True)
class ParserNames:
    """What the operator says of how answers are read. Raises `ConfigError` for a name that nobody knows, and for two
    that cannot be of one model."""

    tools: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        if self.tools not in (AUTO, NONE, HARMONY.name):
            format_named(self.tools)
        if self.reasoning not in (AUTO, NONE, GPT_OSS):
            tags_named(self.reasoning)
        if self._in_harmony and not self._may_be_harmony:
            raise ConfigError(
                f"--tool-parser {self.tools} and --reasoning-parser {self.reasoning} cannot be of one model: gpt-oss "
                "marks thoughts and calls in one way of its own; leave one of them out"
            )

    @property
    def _in_harmony(self) -> bool:
        return self.tools == HARMONY.name or self.reasoning == GPT_OSS

    @property
    def _may_be_harmony(self) -> bool:
        return self.tools in (AUTO, NONE, HARMONY.name) and self.reasoning in (AUTO, NONE, GPT_OSS)

    def harmony(self, template: str) -> bool:
        """Whether answers are written in harmony, which marks thoughts and calls in one way."""
        if self._in_harmony:
            return True
        asked = self._may_be_harmony and AUTO in (self.tools, self.reasoning)
        return asked and all(mark in template for mark in HARMONY.known_by)

    def tool_format(self, template: str) -> ToolFormat | None:
        """A model whose template knows no tools is told of them in Hermes' words, and answers in them."""
        match self.tools:
            case "auto":
                return (format_known_by(template) if "tools" in template else None) or HERMES
            case "none":
                return None
            case name:
                return format_named(name)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        match self.reasoning:
            case "auto":
                return tags_known_by(template)
            case "none":
                return None
            case name:
                return tags_named(name)


@dataclass(frozen=True, kw_only=True)
class ModelFormats:
    """How one model writes its thoughts and its calls of tools."""

    tokenizer: Tokenizer
    reasoning: ReasoningTags | None = None
    """None: what it writes is not told apart."""
    tools: ToolFormat | None = None
    """None: its calls are not read."""
    harmony: bool = False
    """Its answers are messages on channels, as gpt-oss writes them; thoughts are always told apart."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str | None, names: ParserNames | None = None) -> "ModelFormats":
        """`template`: the source of the chat template in use. `names`: None for what the template is known by."""
        names, template = names or ParserNames(), template or ""
        if names.harmony(template):
            return cls(tokenizer=tokenizer, tools=None if names.tools == NONE else HARMONY, harmony=True)
        return cls(tokenizer=tokenizer, reasoning=names.reasoning_tags(template), tools=names.tool_format(template))

    def for_request(
        self,
        prompt: Sequence[int],
        *,
        begun: str = "",
        tools: ToolRules | None = None,
        separate_reasoning: bool = True,
    ) -> AnswerFormat | None:
        """How the answers to one chat prompt are read; None: as they are, there is nothing to tell apart. `tools`: None
        where none may be called.

        `begun`: what of the answer the prompt holds already (the last message, where that is continued).
        `separate_reasoning`: without, thoughts are content as they come, and counted all the same.
        """
        calls = self.tools if tools else None
        if self.harmony:
            return self._harmony(tools if calls else None)
        at_start = self._thought(prompt, begun)
        wrapped = self.reasoning is not None and self.reasoning.around_answer
        if calls is None and at_start is Thought.OVER and not wrapped:
            return None
        return TaggedFormat.of(
            None if self.reasoning is None else Thoughts.of(self.reasoning, at_start, separate=separate_reasoning),
            None if calls is None or tools is None else Tools.of(calls, tools.callable, parallel=tools.parallel),
            visible=self._seen_in_thoughts | (self._seen_in_calls if calls else frozenset()),
        )

    def thinking(self, prompt: Sequence[int], *, begun: str = "", calls: bool = False) -> Thinking | None:
        """What an answer to this prompt may write before a grammar begins. None: nothing, or the grammar sees to it, as
        one of `calls` does in harmony."""
        if self.harmony:
            return None if calls else THOUGHT
        thought = self._thought(prompt, begun)
        if self.reasoning is None or thought is Thought.OVER:
            return None
        opened = thought is not Thought.MAY_COME
        return Thinking(self.reasoning.opens[0], self.reasoning.closes[0], opened)

    def _harmony(self, tools: ToolRules | None) -> AnswerFormat:
        from motet.text.harmony import HarmonyFormat  # here: its library takes 0.1 s, and most models do without

        visible = self._seen_in_calls
        if tools is None:
            return HarmonyFormat(visible=visible)
        return HarmonyFormat(visible=visible, callable=tools.callable, parallel=tools.parallel)

    def _thought(self, prompt: Sequence[int], begun: str) -> Thought:
        """Where an answer stands when the prompt ends."""
        if self.reasoning is None:
            return Thought.OVER
        if begun.strip():
            return _thought_of(begun.lstrip(), self.reasoning)
        tail = self.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(self.reasoning.opens):
            return Thought.OPENED
        return Thought.OVER if tail.endswith(self.reasoning.closes) else Thought.MAY_COME

    @cached_property
    def _seen_in_thoughts(self) -> frozenset[int]:
        tags = self.reasoning
        return frozenset() if tags is None else self._special((*tags.opens, *tags.closes, *tags.around_answer))

    @cached_property
    def _seen_in_calls(self) -> frozenset[int]:
        form = HARMONY if self.harmony else self.tools
        return frozenset() if form is None else self._special((*form.begins, *form.inner, *form.ends))

    def _special(self, tags: Sequence[str]) -> frozenset[int]:
        """Special tokens that are a tag, or a part of one. A vocabulary may have thousands of special tokens."""
        special = self.tokenizer.special_tokens.items()
        return frozenset(token_id for text, token_id in special if text and any(text in tag for tag in tags))


def _thought_of(begun: str, tags: ReasoningTags) -> Thought:
    if not begun.startswith(tags.opens) or any(tag in begun for tag in tags.closes):
        return Thought.OVER
    return Thought.OPENED if begun.rstrip().endswith(tags.opens) else Thought.UNDER_WAY
