"""Streamed answers as OpenAI's chunks: server-sent events made from bytes that are encoded once for each answer.

ChunkWriter ── turns the steps of groups into chunks; most chunks are one text between two constant pieces of bytes
    ChunkTemplate   the bytes that all chunks share
    RunningUsage    the usage that each chunk reports
    ChunkShape      the chunks of one route: for the start of a choice, and for more than its text
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.json import encode as json_bytes
from msgspec.structs import replace

from motet.api.generation.answer_writer import DONE, GroupsWriter, divide_logprobs
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import VersionsShown
from motet.policies.steering import GroupReport
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep
from motet.transfer.ticket import Ticket
from motet.types import Usage

END = b"}\n\n"


class ChunkTemplate:
    """The bytes that are the same in every chunk of an answer. Only the strings that change are encoded for each chunk.

        data: {"id":"cmpl-1","choices":[{"index":0,"text":"Hi","finish_reason":null}],"usage":null}\\n\\n
        └──── start ───────┘                                                        └── closing ──────┘
        └──── opening ──────────────────────────┘

    The order of the keys is the same as in OpenAI's own chunks.

    >>> template = ChunkTemplate(b'{"id":"cmpl-1"', null_usage=True)
    >>> template.opening + b'0,"text":"Hi","finish_reason":null}]' + template.closing
    b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"Hi","finish_reason":null}],"usage":null}\\n\\n'
    >>> template.end(usage=b'{"total_tokens":5}')
    [b'data: {"id":"cmpl-1","choices":[],"usage":{"total_tokens":5}}\\n\\ndata: [DONE]\\n\\n']

    A chunk with nothing but a text is three pieces. Two of them are made once for each choice:

    >>> before = template.opening + b'0,"text":'
    >>> after = b',"finish_reason":null}]' + template.closing
    >>> b"".join((before, json_bytes('"Hi"'), after))
    b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"\\\\"Hi\\\\"","finish_reason":null}],"usage":null}\\n\\n'
    """

    def __init__(self, head: bytes, *, null_usage: bool) -> None:
        """`head`: the first fields of every chunk, as JSON without the closing brace. `null_usage`: chunks with choices
        have a `usage` of null."""
        self.start = b"data: " + head
        self.opening = self.start + b',"choices":[{"index":'
        self.closing = b',"usage":null' + END if null_usage else END

    def closing_with(self, usage: bytes) -> bytes:
        """Returns the closing of a chunk that reports the usage."""
        return b',"usage":' + usage + END

    def end(self, *, usage: bytes | None, reports: Sequence[GroupReport] = ()) -> list[bytes]:
        """Returns the end of the stream: chunks without choices for the reports and the usage, if there are any."""
        last = DONE if usage is None else self.start + b',"choices":[],"usage":' + usage + END + DONE
        if not reports:
            return [last]
        return [self.start + b',"choices":[],"groups":' + json_bytes(reports) + self.closing, last]


class RunningUsage:
    """The usage that each chunk reports: none, null, or the usage so far (`continuous_usage_stats`)."""

    def __init__(self, template: ChunkTemplate, usage_json: Callable[[Usage], bytes], *, continuous: bool) -> None:
        self.continuous = continuous
        self._template = template
        self._usage_json = usage_json
        self._num_sent = 0
        """Number of tokens in the chunks so far. The engine can have generated more: text can be held back."""

    def closing(self, usage: Usage | None, *, num_new: int = 0) -> bytes:
        """Returns the end of a chunk after its choices. `usage`: the usage of the request, None if chunks do not report
        it. `num_new`: the number of tokens in the chunk."""
        if usage is None:
            return self._template.closing
        self._num_sent += num_new
        reasoning_tokens = min(usage.reasoning_tokens or 0, self._num_sent)
        sent = replace(usage, completion_tokens=self._num_sent, reasoning_tokens=reasoning_tokens)
        return self._template.closing_with(self._usage_json(sent))


class ChunkShape(Protocol):
    """The chunks of one route, except the chunks that are only a text."""

    def openings(self, step: GroupStep, indices: Sequence[int], *, closing: bytes) -> list[bytes]:
        """Returns the chunks that come before the first token of each of these choices."""
        ...

    def chunks(self, event: ChoiceEvent, group: int, *, closing: bytes) -> list[bytes]:
        """Returns the chunks of an event. `group`: number of the prompt inside its request."""
        ...


class ChunkWriter(GroupsWriter):
    """Writes groups as a stream. A chunk has one choice; all chunks of a step are one piece of bytes."""

    def __init__(
        self,
        plan: Plan,
        shape: ChunkShape,
        *,
        template: ChunkTemplate,
        usage_json: Callable[[Usage], bytes],
        before_text: bytes = b"",
        after_text: bytes | None = None,
    ) -> None:
        """`before_text`, `after_text`: the bytes around a text between the template's opening, with the index, and its
        closing. `after_text`: None if every chunk has more than a text."""
        self.divide = divide_logprobs(plan)
        self._template = template
        self._shape = shape
        self._usage_json = usage_json
        self._include_usage = plan.include_usage
        self._running_usage = RunningUsage(template, usage_json, continuous=plan.continuous_usage)
        self._group_size = plan.group_size
        num_first = None if plan.policy is None else plan.policy.start
        self._first_choices = [start.index for start in plan.groups[0].choices[:num_first]]
        """The choices of each prompt that start at once. A policy can start more choices later."""
        self._started: set[int] = set()
        """Numbers of the prompts whose first step has arrived."""
        self._reports: dict[int, GroupReport] = {}
        """The reports on groups with a policy that have ended, by the number of the prompt."""
        self._before_text = _text_openings(plan, template, before_text=before_text)
        self._after_text = None
        """The bytes after the text of most chunks; None if they change from chunk to chunk."""
        if after_text is not None and not plan.continuous_usage:
            self._after_text = after_text + template.closing

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        before_text, after_text = self._before_text, self._after_text
        if after_text is not None and len(steps) == 1 and len(events := steps[0].events) == 1:
            event, group = events[0], steps[0].group
            if event.finish is None and event.parts is None and group in self._started:
                return b"".join(
                    (before_text[group * self._group_size + event.index], json_bytes(event.text), after_text)
                )
        running = self._running_usage
        so_far = usage() if running.continuous else None
        chunks: list[bytes] = []
        for step in steps:
            group = step.group
            if group not in self._started:
                self._started.add(group)
                chunks += self._shape.openings(step, self._first_choices, closing=running.closing(so_far))
            first = group * self._group_size
            for event in step.events:
                if after_text is not None and event.finish is None and event.parts is None:
                    chunks += before_text[first + event.index], json_bytes(event.text), after_text
                else:
                    closing = ticket_before(running.closing(so_far, num_new=len(event.token_ids)), step.ticket)
                    chunks += self._shape.chunks(event, group, closing=closing)
            if step.started:
                chunks += self._shape.openings(step, step.started, closing=running.closing(so_far))
            if step.report is not None:
                self._reports[group] = step.report
        return b"".join(chunks)

    def feed_is_long(self, steps: Sequence[GroupStep]) -> bool:
        """True if the first chunks repeat a prompt with its log-probabilities."""
        return any(step.prompt is not None and step.prompt.logprobs is not None for step in steps)

    def close(self, usage: Usage) -> Sequence[bytes]:
        reports = [self._reports[number] for number in sorted(self._reports)]
        return self._template.end(usage=self._usage_json(usage) if self._include_usage else None, reports=reports)


def _text_openings(plan: Plan, template: ChunkTemplate, *, before_text: bytes) -> dict[int, bytes]:
    """Returns the bytes before the text of each choice, by the choice's index in the answer."""
    return {index: b"%b%d%b" % (template.opening, index, before_text) for index in plan.choice_indices}


def ticket_before(closing: bytes, ticket: Ticket | None) -> bytes:
    """Returns the end of a chunk after its choices, with the ticket if there is one."""
    return closing if ticket is None else b',"kv_transfer_params":' + json_bytes(ticket) + closing


def versions_before(closing: bytes, event: ChoiceEvent, *, shown: VersionsShown) -> bytes:
    """Returns the end of a chunk's choice, with the weight versions that generated it if the answer has them."""
    if event.finish is None or not shown.includes(event.weight_versions):
        return closing
    return b',"weight_versions":' + json_bytes(event.weight_versions) + closing


def finish_json(event: ChoiceEvent) -> bytes:
    """Returns the value of `finish_reason`, followed by `stop_reason` at the end of a choice."""
    if not event.finish:
        return b"null"
    return b'"%b","stop_reason":%b' % (event.finish.encode(), json_bytes(event.stop_reason))
