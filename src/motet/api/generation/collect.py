"""Unstreamed answers: the choices of a request collected from their events, and written as one body.

BodyWriter ── collects the steps of the groups, and returns the entire answer at the end
    CollectedAnswer ─► CollectedGroup ─► CollectedChoice    the events of a request, added up
    BodyShape       makes the body of one route from the collected answer
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from motet.api.generation.answer_writer import GroupsWriter
from motet.api.generation.plan import Plan
from motet.api.http.long_work import LONG_WORK
from motet.policies.steering import GroupReport, Keep
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import ranked_logprobs
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, PromptReport, Usage, WeightSpan

PIECE_BYTES = 1 << 18
"""Approximate size of the pieces in which an answer is sent."""
NO_TOKENS = msgspec.Raw(b"[]")
LogprobFields = Mapping[str, Sequence[object]]
"""The arrays of a choice's `logprobs`, by their names; each event adds entries to each."""


class CollectedLogprobs:
    """The log-probabilities of one choice as JSON, since objects would take seven times as much memory."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {}
        """Field -> pieces of its array, without brackets."""

    def add(self, fields: LogprobFields) -> None:
        for name, entries in fields.items():
            pieces = self._pieces.setdefault(name, [])
            if entries:
                pieces.append(msgspec.json.encode(entries)[1:-1])

    def joined(self) -> dict[str, bytes]:
        """Returns the array of each field, without brackets."""
        return {name: b",".join(pieces) for name, pieces in self._pieces.items()}


class CollectedEvents:
    """The content of a choice's events so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs = CollectedLogprobs()


class ChoiceEnd(msgspec.Struct, frozen=True, gc=False):
    """How a choice ended."""

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
    logprobs: dict[str, bytes] | None = None
    """Field -> its array as JSON, without brackets; None if the request has no log-probabilities."""
    calls: tuple[tuple[ToolCallBegin, list[str]], ...] = ()
    """Tool calls, each with the pieces of its arguments."""
    last_token: int | None = None
    end: ChoiceEnd | None = None
    """How the choice ended; None before its end."""
    logprob_mean: LogprobMean = msgspec.field(default_factory=LogprobMean)
    pieces: CollectedEvents | None = None
    """The events so far; None before the first event and after the end."""

    def end_fields(self) -> dict[str, object]:
        """Returns `finish_reason` and `stop_reason` as OpenAI's APIs have them; null before the end."""
        if self.end is None:
            return {"finish_reason": None, "stop_reason": None}
        return {"finish_reason": self.end.finish, "stop_reason": self.end.stop_reason}

    def span_fields(self) -> dict[str, object]:
        """Returns the field with the weight versions that generated the choice, if they are known."""
        spans = self.end.weight_versions if self.end is not None else ()
        return {"weight_versions": spans} if spans else {}

    def logprob_fields(self, *, before: LogprobFields | None = None) -> dict[str, msgspec.Raw]:
        """Returns the arrays as JSON. `before`: entries that come first."""
        entries_before = CollectedLogprobs()
        entries_before.add(before or {})
        first, own = entries_before.joined(), self.logprobs or {}
        return {
            name: msgspec.Raw(b"[" + b",".join(filter(None, (first.get(name), array))) + b"]")
            for name, array in own.items()
        }

    def feed(self, event: ChoiceEvent, fields: LogprobFields | None = None) -> None:
        """`fields`: the event's log-probabilities in the shape of the route, if the request has them."""
        pieces = self.pieces = self.pieces or CollectedEvents()
        pieces.texts.append(event.text)
        pieces.token_ids.extend(event.token_ids)
        self.num_tokens += len(event.token_ids)
        if event.token_ids:
            self.last_token = event.token_ids[-1]
        if event.logprobs is not None:
            self.logprob_mean.total += sum(entry.logprob for entry in event.logprobs)
            self.logprob_mean.count += len(event.logprobs)
        if fields is not None:
            pieces.logprobs.add(fields)
        if event.parts is None:
            pieces.content.append(event.text)
        else:
            self._add_parts(event.parts, pieces)
        if event.finish is not None:
            self.end = ChoiceEnd(event.finish, event.stop_reason, event.weight_versions)
            self.join(pieces)
            self.pieces = None

    def _add_parts(self, parts: Sequence[Part], pieces: CollectedEvents) -> None:
        for part in parts:
            match part:
                case Content(text):
                    pieces.content.append(text)
                case Reasoning(text):
                    pieces.reasoning.append(text)
                case ToolCallBegin():
                    self.calls += ((part, []),)
                case ToolCallArguments():
                    self.calls[part.number][1].append(part.text)

    def so_far(self) -> "CollectedChoice":
        """Returns the choice with the content of its events so far, even before its end."""
        if self.pieces is None:
            return self
        joined = msgspec.structs.replace(self, pieces=None)
        joined.join(self.pieces)
        return joined

    def join(self, pieces: CollectedEvents) -> None:
        """Sets the fields to the joined content of `pieces`."""
        self.text, self.content = "".join(pieces.texts), "".join(pieces.content)
        self.reasoning = "".join(pieces.reasoning)
        self.token_ids = msgspec.Raw(msgspec.json.encode(pieces.token_ids))
        self.logprobs = pieces.logprobs.joined() or None


class CollectedGroup:
    """The choices of one prompt."""

    def __init__(
        self,
        indices: Sequence[int],
        logprobs: Callable[[ChoiceEvent], LogprobFields | None],
        *,
        keep: Keep | None = None,
    ) -> None:
        """`logprobs`: returns an event's log-probabilities in the shape of the route. `keep`: which choices of a group
        with a policy are sent."""
        self._keep = keep
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

    def choice(self, index: int) -> CollectedChoice:
        return self._by_index[index]

    def feed(self, step: GroupStep) -> None:
        self.prompt = step.prompt or self.prompt
        self.ticket = step.ticket or self.ticket
        self.report = step.report or self.report
        for event in step.events:
            fields = None if event.logprobs is None else self._logprobs(event)
            self._by_index[event.index].feed(event, fields)


class CollectedAnswer:
    """All groups of a request."""

    def __init__(self, plan: Plan, logprobs: Callable[[int, ChoiceEvent], LogprobFields | None]) -> None:
        """`logprobs`: see `BodyShape.logprobs`."""
        self.plan = plan
        keep = None if plan.policy is None else plan.policy.keep
        self.groups = [
            CollectedGroup([start.index for start in group.choices], partial(logprobs, number), keep=keep)
            for number, group in enumerate(plan.groups)
        ]

    def feed(self, steps: Sequence[GroupStep]) -> None:
        for step in steps:
            self.groups[step.group].feed(step)

    @property
    def is_long(self) -> bool:
        prompts = sum(len(group.prompt) for group in self.plan.groups)
        answers = sum(choice.num_tokens for group in self.groups for choice in group.choices)
        return prompts + answers >= LONG_WORK

    def prompt_logprobs(self, group: int, num_top: int | None) -> dict[str, object]:
        """Returns the field with the log-probabilities of a prompt, if the request has it."""
        report = self.groups[group].prompt
        if num_top is None or report is None or report.logprobs is None:
            return {}
        return {"prompt_logprobs": ranked_logprobs(self.plan.served.tokenizer, report.logprobs, num_top=num_top)}

    def reports(self) -> dict[str, object]:
        """Returns the field with the reports on groups with a policy, if there are any."""
        reports = [group.report for group in self.groups if group.report is not None]
        return {"groups": reports} if reports else {}

    def openai_body(
        self, kind: str, choices: Iterable[object], *, usage: dict[str, object], **more: object
    ) -> Sequence[bytes]:
        """Returns the answer in OpenAI's shape; the answer to a prefill includes the ticket."""
        rest = {"usage": usage, "kv_transfer_params": self.groups[0].ticket, **more, **self.reports()}
        opening, closing = around_choices(self.plan.head.json(kind), rest)
        return in_pieces(opening, choices, closing=closing)


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

    def __init__(self, plan: Plan, shape: BodyShape) -> None:
        self._shape = shape
        self._answer = CollectedAnswer(plan, shape.logprobs)
        self._groups = self._answer.groups

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        for step in steps:  # `CollectedAnswer.feed`, inlined to save a call for each step
            self._groups[step.group].feed(step)
        return b""

    def close(self, usage: Usage) -> Sequence[bytes]:
        return self._shape.body(self._answer, usage)

    @property
    def is_long(self) -> bool:
        return self._answer.is_long


def in_pieces(opening: bytes, items: Iterable[object], *, closing: bytes) -> Sequence[bytes]:
    """Returns the JSON of an answer with an array of `items` between `opening` and `closing`. Each item is encoded
    separately, since msgspec holds the GIL while it encodes."""
    pieces, piece, before = list[bytes](), bytearray(opening), b""
    for item in items:
        piece += before
        piece += msgspec.json.encode(item)
        before = b","
        if len(piece) >= PIECE_BYTES:
            pieces.append(bytes(piece))
            piece.clear()
    return [*pieces, bytes(piece + closing)]


def around_choices(head: bytes, rest: Mapping[str, object]) -> tuple[bytes, bytes]:
    """Returns the bytes before and after the choices of an answer. `head`: its first fields, without the brace."""
    return head + b',"choices":[', b"]," + msgspec.json.encode(rest)[1:]
