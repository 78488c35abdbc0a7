"""Unstreamed answers: the choices of a request collected from their events, and written as one body.

BodyWriter ── collects the steps of the groups, and returns the entire answer at the end
    CollectedAnswer ─► CollectedGroup ─► CollectedChoice    the events of a request, added up
    BodyShape       makes the body of one route from the collected answer
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from motet.api.generation.answer_writer import (
    LOGPROB_BYTES,
    GroupsWriter,
    OncePerPrompt,
    divide_logprobs,
    encode_prompt_logprobs,
)
from motet.api.generation.json_pieces import EncodedJson, JsonArray, around_choices, encode_answer
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import PromptLogprobs, VersionsShown
from motet.api.http.long_work import LONG_WORK
from motet.policies.steering import GroupReport, Keep
from motet.text.choice import ChoiceEvent, WeightSpan
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, PromptReport, Usage

NO_TOKENS = msgspec.Raw(b"[]")
LogprobFields = Mapping[str, Sequence[object]]
"""The arrays of a choice's `logprobs`, by their names; each event adds entries to each."""
PROMPT_LOGPROBS = "prompt_logprobs"
TOKEN_BYTES = 8
"""Memory of an output token, without its text."""


class GrowingText:
    """A text to which pieces are added, in UTF-8: a string for each token would take ten times as much memory."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, piece: str) -> None:
        self._bytes += piece.encode(errors="surrogatepass")

    def joined(self) -> str:
        return self._bytes.decode(errors="surrogatepass")


class CollectedEvents:
    """The text and the tokens of a choice's events so far, without an object for each event."""

    def __init__(self) -> None:
        self.text = GrowingText()
        self.content: GrowingText | None = None
        self.reasoning: GrowingText | None = None
        """The parts of the text; None until the first event with parts."""
        self.token_ids = array("q")

    def part_texts(self) -> tuple[GrowingText, GrowingText]:
        """Returns the texts of the content and of the reasoning."""
        if self.content is None or self.reasoning is None:
            self.content, self.reasoning = GrowingText(), GrowingText()
        return self.content, self.reasoning


class ChoiceEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a choice."""

    finish: FinishReason
    stop_reason: str | int | None
    weight_versions: tuple[WeightSpan, ...]


class LogprobMean(msgspec.Struct, gc=False):
    """The number of a choice's log-probabilities, and their mean: `best_of` ranks choices by the mean."""

    total: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


class CollectedChoice(msgspec.Struct, gc=False):
    """One choice of an unstreamed answer. A request can have thousands of choices, so garbage collection skips them
    (`gc=False`). A choice is in no reference cycle."""

    index: int
    """Number of the choice inside its group."""
    num_tokens: int = 0
    text: str = ""
    content: str = ""
    """The text without reasoning and tool calls, if they are separated from it."""
    reasoning: str = ""
    token_ids: msgspec.Raw = NO_TOKENS
    """The output tokens, as JSON."""
    logprobs: dict[str, JsonArray] | None = None
    """Field -> its array; None if the request has no log-probabilities."""
    calls: tuple[tuple[ToolCallBegin, GrowingText], ...] = ()
    """Tool calls, each with its arguments."""
    last_token: int | None = None
    end: ChoiceEnd | None = None
    """How the choice ended; None before its end."""
    logprob_mean: LogprobMean = msgspec.field(default_factory=LogprobMean)
    events: CollectedEvents | None = None
    """The events so far; None before the first event and after the end."""

    def end_fields(self) -> dict[str, object]:
        """Returns `finish_reason` and `stop_reason` as OpenAI's APIs have them; null before the end."""
        if self.end is None:
            return {"finish_reason": None, "stop_reason": None}
        return {"finish_reason": self.end.finish, "stop_reason": self.end.stop_reason}

    def span_fields(self, shown: VersionsShown) -> dict[str, object]:
        """Returns the field with the weight versions that generated the choice, if the answer has it."""
        if self.end is None or not shown.includes(self.end.weight_versions):
            return {}
        return {"weight_versions": self.end.weight_versions}

    def logprob_fields(self, *, before: Mapping[str, JsonArray] | None = None) -> dict[str, EncodedJson]:
        """Returns the arrays as JSON. `before`: entries that come first."""
        first = before or {}
        return {name: own.json(before=first.get(name)) for name, own in (self.logprobs or {}).items()}

    def feed(self, event: ChoiceEvent, fields: LogprobFields | None = None) -> int:
        """Adds an event. Returns the number of bytes that it adds. `fields`: the event's log-probabilities in the shape
        of the route, if the request has them."""
        events, num_tokens = self.events, len(event.token_ids)
        if events is None:
            events = self.events = CollectedEvents()
        events.text.write(event.text)
        added = len(event.text) + TOKEN_BYTES * num_tokens
        if num_tokens:
            events.token_ids.extend(event.token_ids)
            self.num_tokens += num_tokens
            self.last_token = event.token_ids[-1]
        if event.logprobs is not None:
            self.logprob_mean.total += sum(entry.logprob for entry in event.logprobs)
            self.logprob_mean.count += len(event.logprobs)
        if fields is not None:
            added += self._add_logprobs(fields)
        if event.parts is not None:
            added += len(event.text)
            self._add_parts(event.parts, events)
        if event.finish is not None:
            self.end = ChoiceEnd(event.finish, event.stop_reason, event.weight_versions)
            self.join(events)
            self.events = None
        return added

    def _add_logprobs(self, fields: LogprobFields) -> int:
        if self.logprobs is None:
            self.logprobs = {name: JsonArray() for name in fields}
        arrays = self.logprobs
        return sum(arrays[name].add(entries) for name, entries in fields.items())

    def _add_parts(self, parts: Sequence[Part], events: CollectedEvents) -> None:
        content, reasoning = events.part_texts()
        for part in parts:
            match part:
                case Content(text):
                    content.write(text)
                case Reasoning(text):
                    reasoning.write(text)
                case ToolCallBegin():
                    self.calls += ((part, GrowingText()),)
                case ToolCallArguments():
                    self.calls[part.number][1].write(part.text)

    def so_far(self) -> "CollectedChoice":
        """Returns the choice with the content of its events so far, even before its end. Its log-probabilities must be
        encoded before the choice has more of them."""
        if self.events is None:
            return self
        joined = msgspec.structs.replace(self, events=None)
        joined.join(self.events)
        return joined

    def join(self, events: CollectedEvents) -> None:
        """Sets the fields to the content of the events."""
        self.text = self.content = events.text.joined()
        if events.content is not None and events.reasoning is not None:
            self.content, self.reasoning = events.content.joined(), events.reasoning.joined()
        self.token_ids = msgspec.Raw(msgspec.json.encode(events.token_ids.tolist()))

    def free(self) -> None:
        """Drops the content of a choice whose JSON has been made."""
        self.text = self.content = self.reasoning = ""
        self.token_ids, self.logprobs, self.calls = NO_TOKENS, None, ()


class CollectedGroup:
    """The choices of one prompt."""

    def __init__(
        self,
        indices: Sequence[int],
        logprobs: Callable[[ChoiceEvent], LogprobFields | None],
        *,
        num_listed: int,
        keep: Keep | None = None,
    ) -> None:
        """`logprobs`: returns an event's log-probabilities in the shape of the route. `num_listed`: number of
        log-probabilities of each scored token of the prompt. `keep`: which choices of a group with a policy are
        sent."""
        self._keep = keep
        self._num_listed = num_listed
        self._by_index = {index: CollectedChoice(index) for index in indices}
        self._logprobs = logprobs
        self.prompt: PromptReport | None = None
        self.ticket: Ticket | None = None
        self.report: GroupReport | None = None
        """The report on a group with a policy; None until the group has ended."""

    @property
    def choices(self) -> list[CollectedChoice]:
        """The choices to send, in the order of their indices."""
        choices = [*self._by_index.values()]
        if self._keep is None:
            return choices
        ended = [(choice, choice.end.finish) for choice in choices if choice.end is not None]
        return [choice for choice, finish in ended if self._keep is Keep.ALL or finish is not FinishReason.ABORT]

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of the prompt's log-probabilities, with alternatives."""
        scores = None if self.prompt is None else self.prompt.logprobs
        return 0 if scores is None else self._num_listed * len(scores)

    def choice(self, index: int) -> CollectedChoice:
        return self._by_index[index]

    def feed(self, step: GroupStep) -> int:
        """Adds a step. Returns the number of bytes that it adds."""
        added = 0
        if step.prompt is not None:
            self.prompt = step.prompt
            added += LOGPROB_BYTES * self.num_prompt_logprobs
        self.ticket = step.ticket or self.ticket
        self.report = step.report or self.report
        for event in step.events:
            fields = None if event.logprobs is None else self._logprobs(event)
            added += self._by_index[event.index].feed(event, fields)
        return added


class CollectedAnswer:
    """All groups of a request."""

    def __init__(self, plan: Plan, logprobs: Callable[[int, ChoiceEvent], LogprobFields | None]) -> None:
        """`logprobs`: see `BodyShape.logprobs`."""
        self.plan = plan
        keep = None if plan.policy is None else plan.policy.keep
        self.groups = [
            CollectedGroup(
                [start.index for start in group.choices],
                partial(logprobs, number),
                num_listed=1 + (group.sampling.prompt_logprobs or 0) + len(group.sampling.prompt_logprob_token_ids),
                keep=keep,
            )
            for number, group in enumerate(plan.groups)
        ]
        self.num_bytes = 0
        """Approximate memory of the events so far."""
        self._prompt_logprobs = OncePerPrompt[EncodedJson]()

    def feed(self, steps: Sequence[GroupStep]) -> None:
        for step in steps:
            self.num_bytes += self.groups[step.group].feed(step)

    @property
    def is_long(self) -> bool:
        """True if encoding the answer is long work."""
        prompts = sum(len(group.prompt) for group in self.plan.groups)
        scored = sum(group.num_prompt_logprobs for group in self.groups)
        answers = sum(choice.num_tokens for group in self.groups for choice in group.choices)
        return prompts + scored + answers >= LONG_WORK

    def prompt_logprobs(self, group: int, fields: PromptLogprobs) -> dict[str, object]:
        """Returns the field with the log-probabilities of a prompt, which is null if the request does not have it."""
        report, tokenizer = self.groups[group].prompt, self.plan.served.tokenizer
        if fields.prompt_logprobs is None or report is None or report.logprobs is None:
            return {PROMPT_LOGPROBS: None}
        encode = partial(encode_prompt_logprobs, report, fields, tokenizer=tokenizer)
        return {PROMPT_LOGPROBS: self._prompt_logprobs.value(group, encode)}

    def reports(self) -> dict[str, object]:
        """Returns the field with the reports on groups with a policy, if there are any."""
        reports = [group.report for group in self.groups if group.report is not None]
        return {"groups": reports} if reports else {}

    def take_choices(self, shape: Callable[[CollectedChoice], object]) -> Iterator[object]:
        """Yields the object of each choice of the only group, and frees the content of the choice afterwards."""
        for choice in self.groups[0].choices:
            yield shape(choice)
            choice.free()

    def openai_body(
        self, kind: str, choices: Iterable[object], *, usage: dict[str, object], **more: object
    ) -> Sequence[bytes]:
        """Returns the answer in OpenAI's shape; the answer to a prefill includes the ticket."""
        rest = {"usage": usage, "kv_transfer_params": self.groups[0].ticket, **more, **self.reports()}
        opening, closing = around_choices(self.plan.head.json(kind), rest)
        return encode_answer(opening, choices, closing=closing)


class BodyShape(Protocol):
    """The unstreamed answer of one route."""

    def logprobs(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        """Returns the log-probabilities of an event; None if the request has none. `group`: number of the prompt."""
        ...

    def body(self, answer: CollectedAnswer, usage: Usage) -> Sequence[bytes]:
        """Returns the body in pieces."""
        ...


class BodyWriter(GroupsWriter):
    """Collects the groups of a request, and writes its answer at the end."""

    content_type = "application/json"
    streams = False
    keeps_answer = True

    def __init__(self, plan: Plan, shape: BodyShape) -> None:
        self.divide = divide_logprobs(plan)
        self._shape = shape
        self._answer = CollectedAnswer(plan, shape.logprobs)

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        self._answer.feed(steps)
        return b""

    @property
    def held_bytes(self) -> int:
        return self._answer.num_bytes

    def close(self, usage: Usage) -> Sequence[bytes]:
        return self._shape.body(self._answer, usage)

    @property
    def close_is_long(self) -> bool:
        return self._answer.is_long
