"""Whole answers: what the events of one choice add up to."""

from collections.abc import Sequence

import msgspec

from motet.api.open_groups import Step
from motet.text.choice import ChoiceEvent
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, PromptReport, TokenLogprob


class WholeCall(msgspec.Struct):
    """A tool call as far as it has come."""

    id: str
    name: str
    arguments: list[str]


class WholeParts:
    """What a choice said, thought and called, where its text is read as parts."""

    def __init__(self) -> None:
        self.calls: list[WholeCall] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def feed(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case ToolCallBegin():
                    self.calls.append(WholeCall(part.id, part.name, []))
                case ToolCallArguments():
                    self.calls[part.number].arguments.append(part.text)


class WholeChoice:
    """One choice of an answer that is sent in one piece."""

    def __init__(self, index: int) -> None:
        self.index = index
        """Number of the choice inside its group."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []
        """Where in the answer the text of each of `logprobs` begins."""
        self.finish = FinishReason.STOP
        self.stop_reason: str | int | None = None
        self.parts: WholeParts | None = None
        """None: nothing was told apart in its text."""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        """How likely the model finds its own answer, a token; what `best_of` ranks by."""
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0

    def feed(self, event: ChoiceEvent) -> None:
        self._texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs or ())
        self.offsets.extend(event.offsets or ())
        if event.parts is not None:
            self.parts = self.parts or WholeParts()
            self.parts.feed(event.parts)
        if event.finish is not None:
            self.finish, self.stop_reason = event.finish, event.stop_reason


class WholeGroup:
    """The choices of one prompt."""

    def __init__(self, size: int) -> None:
        self.choices = [WholeChoice(index) for index in range(size)]
        self.prompt: PromptReport | None = None
        self.ticket: Ticket | None = None

    def feed(self, step: Step) -> None:
        self.prompt = step.events.prompt or self.prompt
        self.ticket = step.ticket or self.ticket
        for event in step.events.events:
            self.choices[event.index].feed(event)

    def best(self, count: int) -> list[WholeChoice]:
        """The `count` most likely ones, best first; all of them in their own order if `count` is all."""
        if count == len(self.choices):
            return self.choices
        return sorted(self.choices, key=lambda choice: -choice.mean_logprob)[:count]
