"""The choices of one group as text: turns the engine's deltas into events and counts."""

from collections.abc import Mapping, Sequence

import msgspec

from motet.engine_info import FIRST_VERSION
from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules, WeightSpan
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, Finish, FinishReason, GenerateRequest, GroupDelta


class GroupChoices:
    """The `ChoiceStream` of each choice of a group. They exist from the first delta to `close`: a request can have
    thousands of groups, and only a few of them run at a time."""

    def __init__(self, request: GenerateRequest, *, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._rules = rules
        self._streams: dict[int, ChoiceStream] = {}
        self._closed_counts: dict[int, int] = {start.index: 0 for start in request.choices}
        """Number of output tokens of each choice while there are no streams."""
        self._closed_reasoning_tokens = 0
        self._versions = WeightVersions()
        self._known_tokens: Mapping[int, int] = {}
        """Number of tokens of each choice that the client sent."""
        if rules.client_sent_output:
            self._known_tokens = {start.index: len(start.output_tokens) for start in request.choices}
        self._fresh = True
        """True until the first delta."""
        if any(start.output_tokens for start in request.choices):
            self._open()

    def feed(self, delta: GroupDelta, events: list[ChoiceEvent]) -> Sequence[int]:
        """Adds the events of a step to `events`. Returns the choices that have ended in it. Raises
        `AnswerParserError`. Choices that had ended before they were resumed end in the first step; they have an event
        only if the client sent the tokens that they start with."""
        ended: Sequence[int] = ()
        if self._fresh:
            self._fresh = False
            ended = self._open()
            if self._rules.client_sent_output:
                events += [self._streams[index].last_event for index in ended]
        streams = self._streams
        if delta.weight_version:
            self._versions.add(delta.weight_version, self.num_tokens)
        for added in delta.choices:
            event = streams[added.index].feed(added)
            if event is not None:
                if event.finish is not None:
                    event = self._with_versions(event)
                    ended = [*ended, event.index]
                events.append(event)
        return ended

    def abort(self, index: int) -> ChoiceEvent | None:
        """Ends a choice at its current position. Returns its last event; None if it had ended."""
        self._fresh = False
        self._open()
        event = self._streams[index].feed(ChoiceDelta(index, (), None, Finish(FinishReason.ABORT)))
        return None if event is None else self._with_versions(event)

    def length(self, index: int) -> int:
        """Returns the number of tokens of a choice up to its end, including the tokens that it started with."""
        return self._streams[index].num_tokens

    @property
    def num_tokens(self) -> dict[int, int]:
        """Number of output tokens of each choice so far, without tokens that the client sent."""
        known = self._known_tokens
        return self._closed_counts | {
            index: stream.num_tokens - known.get(index, 0) for index, stream in self._streams.items()
        }

    @property
    def reasoning_tokens(self) -> int:
        return self._closed_reasoning_tokens + sum(stream.reasoning_tokens for stream in self._streams.values())

    def close(self) -> None:
        """Frees the streams. The counts stay."""
        self._closed_counts, self._closed_reasoning_tokens = self.num_tokens, self.reasoning_tokens
        self._streams = {}

    def _open(self) -> list[int]:
        """Makes the streams, unless they exist. Returns the choices that have ended."""
        prompt, tokenizer, rules = self._request.prompt, self._tokenizer, self._rules
        for start in () if self._streams else self._request.choices:
            self._streams[start.index] = ChoiceStream(start, prompt, tokenizer=tokenizer, rules=rules)
        return [index for index, stream in self._streams.items() if stream.ended]

    def _with_versions(self, event: ChoiceEvent) -> ChoiceEvent:
        """Returns the last event of a choice with the versions of the weights that generated its tokens."""
        num_tokens = self._streams[event.index].num_tokens - self._known_tokens.get(event.index, 0)
        spans = self._versions.spans(event.index, num_tokens)
        return msgspec.structs.replace(event, weight_versions=spans)


class WeightVersions:
    """The weight versions that have generated the tokens of a group, and the lengths of the choices at each change."""

    def __init__(self) -> None:
        self._versions: list[tuple[str, Mapping[int, int]]] = []
        """Versions after the first one, each with the number of tokens of each choice at the change to it."""

    def add(self, version: str, num_tokens: Mapping[int, int]) -> None:
        self._versions.append((version, num_tokens))

    def spans(self, index: int, num_tokens: int) -> tuple[WeightSpan, ...]:
        """Returns the spans of a choice with `num_tokens` tokens, none without tokens."""
        if not self._versions:
            return (WeightSpan(FIRST_VERSION, 0, num_tokens),) if num_tokens else ()
        spans = list[WeightSpan]()
        starts = [(FIRST_VERSION, 0), *((version, tokens[index]) for version, tokens in self._versions)]
        ends = [*(start for _, start in starts[1:]), num_tokens]
        for (version, start), end in zip(starts, ends, strict=True):
            if end > start and spans and spans[-1].version == version:
                spans[-1] = WeightSpan(version, spans[-1].start, end)
            elif end > start:
                spans.append(WeightSpan(version, start, end))
        return tuple(spans)
