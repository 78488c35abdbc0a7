"""Answers in which tags tell what is what: thoughts first, then content and calls of tools.

    <think> ... </think>  content  <tool_call> ... </tool_call>
    Reasoning             Content  ToolCallBegin, ToolCallArguments

Thoughts stand at the beginning and nowhere else; the first closing tag ends them, and an opening tag within or behind
them is text. White space between a tag and the text beside it is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from motet.text.calling import Calling, Calls
from motet.text.parts import Part
from motet.text.reasoning import ReasoningTags
from motet.text.stages import Beginning, Saying, Stage, Thinking, ThinkingAloud
from motet.text.stop import StopStrings
from motet.text.tools.base import Tool, ToolFormat


class Thought(Enum):
    """Where an answer stands in its thoughts."""

    MAY_COME = auto()
    OPENED = auto()
    """Right behind the opening tag."""
    UNDER_WAY = auto()
    OVER = auto()


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """How the answers of a request think."""

    opens: tuple[str, ...]
    closes: StopStrings
    dropped: frozenset[str]
    """Tags around the content behind them."""
    at_start: Thought
    """Where an answer stands when the prompt ends."""
    separate: bool
    """Whether they are told apart from content."""

    @classmethod
    def of(cls, tags: ReasoningTags, at_start: Thought, *, separate: bool) -> "Thoughts":
        return cls(
            opens=tags.opens,
            closes=StopStrings(tags.closes),
            dropped=frozenset(tags.around_answer) if separate else frozenset(),
            at_start=at_start,
            separate=separate,
        )


@dataclass(frozen=True, kw_only=True)
class Tools:
    """How the answers of a request call tools."""

    form: ToolFormat
    callable: tuple[Tool, ...]
    parallel: bool
    ends: StopStrings | None

    @classmethod
    def of(cls, form: ToolFormat, callable: tuple[Tool, ...], *, parallel: bool) -> "Tools":
        ends = StopStrings(form.ends) if form.ends else None
        return cls(form=form, callable=callable, parallel=parallel, ends=ends)


@dataclass(frozen=True, kw_only=True)
class TaggedFormat:
    """The `AnswerFormat` of one request."""

    visible: frozenset[int]
    thoughts: Thoughts | None
    tools: Tools | None
    begins: StopStrings | None
    """Tags that end content."""

    @classmethod
    def of(cls, thoughts: Thoughts | None, tools: Tools | None, *, visible: frozenset[int]) -> "TaggedFormat":
        begins = (*(tools.form.begins if tools else ()), *(thoughts.dropped if thoughts else ()))
        return cls(visible=visible, thoughts=thoughts, tools=tools, begins=StopStrings(begins) if begins else None)

    def parser(self) -> "TaggedParser":
        return TaggedParser(self)


class TaggedParser:
    """The `AnswerParser` of one choice."""

    def __init__(self, form: TaggedFormat) -> None:
        self._form = form
        tools = form.tools
        self._calls = Calls(tools.form, tools.callable, parallel=tools.parallel) if tools else None
        self._tokens = 0
        """Fed until the thoughts were over."""
        self._has_thought = False
        self._over = False
        self._stage = self._first()

    @property
    def reasoning_tokens(self) -> int:
        return self._tokens if self._has_thought else 0

    @property
    def called(self) -> bool:
        return self._calls is not None and self._calls.all_whole

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        if not self._over:
            self._tokens += len(token_ids)
        step = self._stage.feed(text)
        parts = step.parts
        while step.next is not None:
            self._stage = step.next
            step = self._stage.feed(step.rest)
            parts = parts + step.parts
        return parts

    def close(self, *, cut: bool) -> list[Part]:
        return self._stage.close(cut=cut)

    def _first(self) -> Stage:
        thoughts = self._form.thoughts
        at_start = thoughts.at_start if thoughts else Thought.OVER
        if thoughts is None or at_start is Thought.OVER:
            return self._begin_saying(after_tag=False)
        if at_start is Thought.MAY_COME:
            return Beginning(
                thoughts.opens,
                thinking=lambda before: self._think(thoughts, before, after_tag=True),
                saying=lambda: self._begin_saying(after_tag=False),
            )
        return self._think(thoughts, "", after_tag=at_start is Thought.OPENED)

    def _think(self, thoughts: Thoughts, before: str, *, after_tag: bool) -> Stage:
        self._has_thought = True
        if not thoughts.separate:
            return ThinkingAloud(thoughts.closes, before=before, saying=lambda: self._begin_saying(after_tag=False))
        return Thinking(thoughts.closes, after_tag=after_tag, saying=lambda: self._begin_saying(after_tag=True))

    def _begin_saying(self, *, after_tag: bool) -> Stage:
        """Behind the thoughts, if there were any."""
        self._over = True
        tools = self._form.tools
        return self._say(after_tag=after_tag, bare=tools.form.bare if tools else None)

    def _say(self, *, after_tag: bool, bare: str | None = None) -> Stage:
        thoughts = self._form.thoughts
        return Saying(
            self._form.begins,
            after_tag=after_tag,
            calling=self._call if self._form.tools else None,
            dropped=thoughts.dropped if thoughts else frozenset(),
            bare=bare,
        )

    def _call(self, begun: str) -> Stage:
        tools, calls = self._form.tools, self._calls
        if tools is None or calls is None:
            raise ValueError("without tools nothing is called")
        return Calling(calls, tools.ends, begun, saying=lambda after_tag: self._say(after_tag=after_tag))
