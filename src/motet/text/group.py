"""The text of one group: the engine's deltas in, the events of all its choices out, step by step.

1. Submits the request at once.
2. Each step: feeds every choice its delta; steps in which no choice has anything to show are passed over.
3. A stop string that was found ends the choice here; the engine is told, and what it still sends is ignored.
4. When the last choice has ended the engine's stream is closed, before the reader gets the last events.
"""

import logging
from collections.abc import Collection, Sequence

import msgspec

from motet.engines.base import Engine
from motet.errors import AnswerParserError, EngineError
from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules
from motet.text.parsed import ParsedChoice
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage
from motet.types import GenerateRequest, GroupDelta, PromptReport

log = logging.getLogger("motet.text")


class GroupEvents(msgspec.Struct, frozen=True, gc=False):
    """What one step has to show, all choices together; never empty."""

    events: tuple[ChoiceEvent, ...]
    prompt: PromptReport | None = None
    """On the first of a group only."""


class TextGroup:
    """Iterate to the end or call `aclose`: it owns the engine's stream.

    Iterating raises what the engine's stream raises, and `AnswerParserError`; then the group is over.
    """

    def __init__(self, engine: Engine, request: GenerateRequest, tokenizer: Tokenizer, rules: TextRules) -> None:
        stops = rules.stop_strings()
        form = ChoiceStream if rules.format is None else ParsedChoice
        self._choices: dict[int, ChoiceStream | ParsedChoice] = {
            start.index: form(start, request.prompt, tokenizer=tokenizer, rules=rules, stops=stops)
            for start in request.choices
        }
        self._unfinished = set(self._choices)
        self._ended_before = [index for index, choice in self._choices.items() if choice.ended]
        """Resumed behind a stop string; the engine is told after its first step."""
        self._request = request
        self._engine = engine
        self._cached_tokens = 0
        self.worker = ""
        """Who writes the choices, once the engine has told, if it tells."""
        self._stream = engine.generate(request)

    def __aiter__(self) -> "TextGroup":
        return self

    async def __anext__(self) -> GroupEvents:
        while self._unfinished:
            try:
                delta = await self._stream.__anext__()
            except StopAsyncIteration:
                raise self._broken_off() from None
            events: list[ChoiceEvent] = []
            ended = self._ended_before
            try:
                fed = [self._choices[choice.index].feed(choice) for choice in delta.choices]
            except AnswerParserError:  # a bug of ours, and the client is not told where
                log.exception("an answer could not be read", extra={"fields": {"request_id": self._request.request_id}})
                await self.aclose()  # nobody reads on: the engine must not write for nothing
                raise
            for event in fed:
                if event is not None:
                    events.append(event)
                    if event.finish is not None:
                        ended = [*ended, event.index]
            if delta.prompt is not None:
                self._cached_tokens = delta.prompt.cached_tokens
                self.worker = delta.prompt.worker
            if ended:
                await self._end(ended, delta)
            if events or delta.prompt is not None:
                return GroupEvents(tuple(events), delta.prompt)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the group if it is not over. May be called at any time, twice too."""
        await self._stream.aclose()

    @property
    def usage(self) -> Usage:
        """So far."""
        return self._usage(self._choices.values())

    def usage_of(self, index: int) -> Usage:
        """The prompt and one choice, so far."""
        return self._usage([self._choices[index]])

    def _usage(self, choices: Collection[ChoiceStream | ParsedChoice]) -> Usage:
        return Usage(
            prompt_tokens=len(self._request.prompt),
            completion_tokens=sum(choice.num_tokens for choice in choices),
            cached_tokens=self._cached_tokens,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in choices),
        )

    async def _end(self, indices: Sequence[int], delta: GroupDelta) -> None:
        """Choices that have ended, in `delta` for the engine too or only here."""
        known = {choice.index for choice in delta.choices if choice.finish is not None}
        self._ended_before = []
        self._unfinished.difference_update(indices)
        for index in indices:
            if index not in known:
                await self._engine.stop_choice(self._request.request_id, index)
        if not self._unfinished:
            await self.aclose()

    def _broken_off(self) -> EngineError:
        return EngineError(
            f"the engine ended group {self._request.request_id} before its choices {sorted(self._unfinished)} had ended"
        )
