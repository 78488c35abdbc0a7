"""One choice whose text is read as parts: its own parser behind its own `ChoiceStream`.

The parser gets one token after the other, however the engine bundles them, so neither the parts nor the count of
reasoning tokens depend on that. A choice that starts with written tokens has all of them read again.
"""

from collections.abc import Iterator, Sequence

from motet.errors import AnswerParserError
from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules
from motet.text.stop import StopStrings
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, ChoiceStart, FinishReason


class ParsedChoice:
    """A `ChoiceStream` whose events have parts. Raises `AnswerParserError` if the parser fails."""

    def __init__(
        self,
        start: ChoiceStart,
        prompt: Sequence[int],
        *,
        tokenizer: Tokenizer,
        rules: TextRules,
        stops: StopStrings | None,
    ) -> None:
        if rules.format is None:
            raise ValueError("a choice is parsed by a format")
        fresh = ChoiceStart(start.index, start.seed)
        self._text = ChoiceStream(fresh, prompt, tokenizer=tokenizer, rules=rules, stops=stops)
        self._parser = rules.format.parser()
        self.feed(ChoiceDelta(start.index, start.written))  # what it shows was shown before

    @property
    def ended(self) -> bool:
        return self._text.ended

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def feed(self, delta: ChoiceDelta) -> ChoiceEvent | None:
        """As `ChoiceStream.feed`. There may be text and no parts: some of it may yet become a tag."""
        if len(delta.token_ids) <= 1:
            event = self._text.feed(delta)
            return None if event is None else self._with_parts(event)
        events = [self._with_parts(event) for one in _single(delta) if (event := self._text.feed(one)) is not None]
        return _joined(events) if events else None

    def _with_parts(self, event: ChoiceEvent) -> ChoiceEvent:
        finish = event.finish
        try:
            parts = self._parser.feed(event.text, event.token_ids)
            if finish is not None:
                cut = finish is not FinishReason.STOP or event.stop_reason is not None
                parts = parts + self._parser.close(cut=cut)
                if finish is FinishReason.STOP and self._parser.called:
                    finish = FinishReason.TOOL_CALLS
        except Exception as error:
            raise AnswerParserError(f"the answer of choice {event.index} could not be read: {error!r}") from error
        return ChoiceEvent(
            event.index,
            event.text,
            event.token_ids,
            event.logprobs,
            event.offsets,
            finish,
            event.stop_reason,
            tuple(parts),
        )


def _single(delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
    """A token each; the end of the choice goes with the last."""
    last = len(delta.token_ids) - 1
    for place, token_id in enumerate(delta.token_ids):
        logprobs = None if delta.logprobs is None else delta.logprobs[place : place + 1]
        yield ChoiceDelta(delta.index, (token_id,), logprobs, delta.finish if place == last else None)


def _joined(events: Sequence[ChoiceEvent]) -> ChoiceEvent:
    last = events[-1]
    return ChoiceEvent(
        last.index,
        "".join(event.text for event in events),
        tuple(token_id for event in events for token_id in event.token_ids),
        None if last.logprobs is None else tuple(one for event in events for one in event.logprobs or ()),
        None if last.offsets is None else tuple(one for event in events for one in event.offsets or ()),
        last.finish,
        last.stop_reason,
        tuple(part for event in events for part in event.parts or ()),
    )
