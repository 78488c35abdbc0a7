"""Whole answers: what the events of a choice add up to, and `usage` as OpenAI writes it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from motet.api.generation.answer import GroupsWriter, head_json
from motet.api.generation.plan import Plan
from motet.api.generation.prompts import LONG_TEXT
from motet.policies.steering import GroupReport, Keep
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import ranked_logprobs
from motet.text.parts import Content, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, PromptReport, Usage, WeightSpan

PIECE_BYTES = 1 << 18
"""A whole answer is sent in pieces of about this size."""
NO_TOKENS = msgspec.Raw(b"[]")
LogprobFields = Mapping[str, Sequence[object]]
"""The arrays of `logprobs` of a choice, by their names; an event adds to each."""


class WholeWriter(GroupsWriter):
    """A writer whose answer goes out at the end; `close` makes it from the groups."""

    content_type = "application/json"
    streams = False

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        keep = None if plan.policy is None else plan.policy.keep
        self._groups = [
            WholeGroup([start.index for start in group.choices], partial(self._logprobs_of, number), keep=keep)
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

    def reports(self) -> dict[str, object]:
        """Returns the field that tells what has become of groups with a policy."""
        reports = [group.report for group in self._groups if group.report is not None]
        return {"groups": reports} if reports else {}

    @property
    def is_long(self) -> bool:
        prompts = sum(len(group.prompt) for group in self._plan.groups)
        answers = sum(choice.num_tokens for group in self._groups for choice in group.choices)
        return prompts + answers >= LONG_TEXT

    def whole(
        self, kind: str, choices: Iterable[object], *, usage: dict[str, object], **more: object
    ) -> Sequence[bytes]:
        """Returns an answer in OpenAI's shape, with its head and, after a prefill, the ticket."""
        rest = {"usage": usage, "kv_transfer_params": self._groups[0].ticket, **more, **self.reports()}
        opening, closing = around_choices(head_json(self._plan.head, kind), rest)
        return in_pieces(opening, choices, closing=closing)


def in_pieces(opening: bytes, items: Iterable[object], *, closing: bytes) -> Sequence[bytes]:
    """Returns the JSON of an answer with an array of `items` between `opening` and `closing`. Each item becomes JSON
    alone: while msgspec works, no other thread runs Python."""
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
    """Returns what stands before and behind the choices of an answer. `head`: its first fields, less the brace."""
    return head + b',"choices":[', b"]," + msgspec.json.encode(rest)[1:]


class WholeLogprobs:
    """The log-probabilities of one choice, as JSON: objects would take seven times as much memory."""

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
    """What the events of a choice have brought until now."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs = WholeLogprobs()


class WholeChoice(msgspec.Struct, gc=False):
    """One choice of an answer that is sent whole; all is there once it has ended. A request may have thousands, so one
    that has ended has no parts that the garbage collector looks at, and points to nothing that points back."""

    index: int
    """Number of the choice inside its group."""
    num_tokens: int = 0
    text: str = ""
    content: str = ""
    """The text without thoughts and calls, if they are told apart in it."""
    reasoning: str = ""
    token_ids: msgspec.Raw = NO_TOKENS
    """The tokens, as JSON."""
    logprobs: dict[str, bytes] | None = None
    """Field -> its array as JSON, without brackets; None: they were not asked for."""
    calls: tuple[tuple[ToolCallBegin, list[str]], ...] = ()
    """Calls of tools, each with the pieces of its arguments."""
    last_token: int | None = None
    finish: FinishReason | None = None
    """None until it has ended."""
    stop_reason: str | int | None = None
    weight_versions: tuple[WeightSpan, ...] = ()
    logprob_sum: float = 0.0
    num_logprobs: int = 0
    pieces: CollectedEvents | None = None
    """None before its first event and after its end."""

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the answer's tokens, by which `best_of` ranks."""
        return self.logprob_sum / self.num_logprobs if self.num_logprobs else 0.0

    def span_fields(self) -> dict[str, object]:
        """Returns the field that tells who has written the choice, if it is told."""
        return {"weight_versions": self.weight_versions} if self.weight_versions else {}

    def logprob_fields(self, *, before: LogprobFields | None = None) -> dict[str, msgspec.Raw]:
        """`before`: entries that come first."""
        first = WholeLogprobs()
        first.add(before or {})
        told, own = first.joined(), self.logprobs or {}
        return {
            name: msgspec.Raw(b"[" + b",".join(filter(None, (told.get(name), array))) + b"]")
            for name, array in own.items()
        }

    def feed(self, event: ChoiceEvent, fields: LogprobFields | None = None) -> None:
        """`fields`: the log-probabilities of the event in the route's own form, if they were asked for."""
        pieces = self.pieces = self.pieces or CollectedEvents()
        pieces.texts.append(event.text)
        pieces.token_ids.extend(event.token_ids)
        self.num_tokens += len(event.token_ids)
        if event.token_ids:
            self.last_token = event.token_ids[-1]
        if event.logprobs is not None:
            self.logprob_sum += sum(entry.logprob for entry in event.logprobs)
            self.num_logprobs += len(event.logprobs)
        if fields is not None:
            pieces.logprobs.add(fields)
        for part in (Content(event.text),) if event.parts is None else event.parts:
            match part:
                case Content(text):
                    pieces.content.append(text)
                case Reasoning(text):
                    pieces.reasoning.append(text)
                case ToolCallBegin():
                    self.calls += ((part, []),)
                case ToolCallArguments():
                    self.calls[part.number][1].append(part.text)
        if event.finish is not None:
            self.finish, self.stop_reason = event.finish, event.stop_reason
            self.weight_versions = event.weight_versions
            self.join(pieces)
            self.pieces = None

    def so_far(self) -> "WholeChoice":
        """Returns the choice with all that has come, if it has not ended."""
        if self.pieces is None:
            return self
        joined = msgspec.structs.replace(self, pieces=None)
        joined.join(self.pieces)
        return joined

    def join(self, pieces: CollectedEvents) -> None:
        """Sets what `pieces` add up to."""
        self.text, self.content = "".join(pieces.texts), "".join(pieces.content)
        self.reasoning = "".join(pieces.reasoning)
        self.token_ids = msgspec.Raw(msgspec.json.encode(pieces.token_ids))
        self.logprobs = pieces.logprobs.joined() or None


class WholeGroup:
    """The choices of one prompt."""

    def __init__(
        self,
        indices: Sequence[int],
        logprobs_of: Callable[[ChoiceEvent], LogprobFields | None],
        *,
        keep: Keep | None = None,
    ) -> None:
        """`logprobs_of`: see `WholeWriter`. `keep`: which choices to send of a group with a policy."""
        self._keep = keep
        self._by_index = {index: WholeChoice(index) for index in indices}
        self._logprobs_of = logprobs_of
        self.prompt: PromptReport | None = None
        self.ticket: Ticket | None = None
        self.report: GroupReport | None = None
        """The report on a group with a policy; None until it is over."""

    @property
    def choices(self) -> list[WholeChoice]:
        """The choices to send, in the order of their indices."""
        choices = [*self._by_index.values()]
        if self._keep is None:
            return choices
        begun = [choice for choice in choices if choice.finish is not None]
        if self._keep is Keep.ALL:
            return begun
        return [choice for choice in begun if choice.finish is not FinishReason.ABORT]

    def choice(self, index: int) -> WholeChoice:
        return self._by_index[index]

    def feed(self, step: GroupStep) -> None:
        self.prompt = step.prompt or self.prompt
        self.ticket = step.ticket or self.ticket
        self.report = step.report or self.report
        for event in step.events:
            fields = None if event.logprobs is None else self._logprobs_of(event)
            self._by_index[event.index].feed(event, fields)


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
