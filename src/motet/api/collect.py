"""Whole answers: what the events of a choice add up to, and `usage` as OpenAI writes it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from motet.api.answer import GroupsWriter, head_json
from motet.api.plan import LONG_TEXT, Plan
from motet.text.choice import ChoiceEvent
from motet.text.group import GroupStep
from motet.text.logprobs import ranked_logprobs
from motet.text.parts import Content, Reasoning, ToolCallArguments, ToolCallBegin
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, PromptReport, TokenLogprob, Usage, WeightSpan

LogprobFields = Mapping[str, Sequence[object]]
"""The arrays of `logprobs` of a choice, by their names; an event adds to each."""


class WholeWriter(GroupsWriter):
    """A writer whose answer goes out in one piece; `close` makes it from the groups."""

    content_type = "application/json"
    streams = False

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._groups = [
            WholeGroup([start.index for start in group.choices], partial(self._logprobs_of, number))
            for number, group in enumerate(plan.groups)
        ]

    def _logprobs_of(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        """Returns the log-probabilities of an event in the route's own form; None if they were not asked for."""
        return None

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            self._groups[step.group].feed(step)
        return b""

    def prompt_logprobs(self, group: int, num_top: int | None) -> dict[str, object]:
        """Returns the field with the log-probabilities of a prompt, if it was asked for."""
        report = self._groups[group].prompt
        if num_top is None or report is None or report.logprobs is None:
            return {}
        return {"prompt_logprobs": ranked_logprobs(self._plan.served.tokenizer, report.logprobs, num_top=num_top)}

    @property
    def is_long(self) -> bool:
        prompts = sum(len(group.prompt) for group in self._plan.groups)
        answers = sum(len(choice.token_ids) for group in self._groups for choice in group.choices)
        return prompts + answers >= LONG_TEXT

    def whole(self, kind: str, choices: Sequence[object], *, usage: dict[str, object], **more: object) -> bytes:
        """Returns an answer in OpenAI's shape, with its head and, after a prefill, the ticket."""
        members = {"choices": choices, "usage": usage, "kv_transfer_params": self._groups[0].ticket, **more}
        return head_json(self._plan.head, kind) + b"," + msgspec.json.encode(members)[1:]


class WholeLogprobs:
    """The log-probabilities of one choice, as JSON: in the end, objects would take seven times as much memory."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {}
        """Field -> pieces of its array, without brackets."""

    def add(self, fields: LogprobFields) -> None:
        for name, entries in fields.items():
            pieces = self._pieces.setdefault(name, [])
            if entries:
                pieces.append(msgspec.json.encode(entries)[1:-1])

    def fields(self, *, before: LogprobFields | None = None) -> dict[str, msgspec.Raw]:
        """`before`: entries that come first."""
        first = WholeLogprobs()
        first.add(before or {})
        return {
            name: msgspec.Raw(b"[" + b",".join(first._pieces.get(name, []) + pieces) + b"]")
            for name, pieces in self._pieces.items()
        }


class WholeChoice:
    """One choice of an answer that is sent in one piece."""

    def __init__(self, index: int, logprobs_of: Callable[[ChoiceEvent], LogprobFields | None]) -> None:
        """`index`: number of the choice inside its group."""
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: WholeLogprobs | None = None
        """None: they were not asked for."""
        self._logprobs_of = logprobs_of
        self._logprob_sum, self._num_logprobs = 0.0, 0
        self.finish = FinishReason.STOP
        self.stop_reason: str | int | None = None
        self.weight_versions: tuple[WeightSpan, ...] = ()
        self.calls: list[tuple[ToolCallBegin, list[str]]] = []
        """Calls of tools, each with the pieces of its arguments."""
        self._texts: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def content(self) -> str:
        """The text of the answer without thoughts and calls, if they are told apart in it."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the answer's tokens, by which `best_of` ranks."""
        return self._logprob_sum / self._num_logprobs if self._num_logprobs else 0.0

    def feed(self, event: ChoiceEvent) -> None:
        self._texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            self._take_logprobs(event, event.logprobs)
        for part in (Content(event.text),) if event.parts is None else event.parts:
            match part:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case ToolCallBegin():
                    self.calls.append((part, []))
                case ToolCallArguments():
                    self.calls[part.number][1].append(part.text)
        if event.finish is not None:
            self.finish, self.stop_reason = event.finish, event.stop_reason
            self.weight_versions = event.weight_versions

    def _take_logprobs(self, event: ChoiceEvent, logprobs: Sequence[TokenLogprob]) -> None:
        self._logprob_sum += sum(entry.logprob for entry in logprobs)
        self._num_logprobs += len(logprobs)
        if (fields := self._logprobs_of(event)) is not None:
            self.logprobs = self.logprobs or WholeLogprobs()
            self.logprobs.add(fields)


class WholeGroup:
    """The choices of one prompt."""

    def __init__(self, indices: Sequence[int], logprobs_of: Callable[[ChoiceEvent], LogprobFields | None]) -> None:
        self._by_index = {index: WholeChoice(index, logprobs_of) for index in indices}
        self.choices = [*self._by_index.values()]
        self.prompt: PromptReport | None = None
        self.ticket: Ticket | None = None

    def feed(self, step: GroupStep) -> None:
        self.prompt = step.prompt or self.prompt
        self.ticket = step.ticket or self.ticket
        for event in step.events:
            self._by_index[event.index].feed(event)

    def best(self, count: int) -> list[WholeChoice]:
        """Returns the `count` most likely ones, best first; all of them in their own order if `count` is all."""
        if count == len(self.choices):
            return self.choices
        return sorted(self.choices, key=lambda choice: -choice.mean_logprob)[:count]


def usage_shape(usage: Usage, *, reasoning: bool = False) -> dict[str, object]:
    """Leaves out details that nobody has reported. `reasoning`: reports the tokens of thoughts also if there are none,
    as OpenAI does for chats."""
    shape: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        shape["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if reasoning and usage.reasoning_tokens is not None:
        shape["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shape


def usage_json(usage: Usage) -> bytes:
    return msgspec.json.encode(usage_shape(usage))


def chat_usage_json(usage: Usage | None) -> bytes:
    """Returns null if a text upstream has not reported its usage."""
    return b"null" if usage is None else msgspec.json.encode(usage_shape(usage, reasoning=True))
