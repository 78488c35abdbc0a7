"""The text of one choice: tokens in, events out.

    delta ─► Detokenizer ─► StopMatcher ──► AnswerParser ─► event
             holds parts    holds text      holds text that can
             of characters  that can        become a tag; only if
                            become a stop   reasoning and calls
                            string          are separated

A token and its log-probability are in the event that shows the end of the token's text. So ids and text agree after
each event, even if the stream breaks there. Tokens are processed one by one, so how an engine bundles tokens into
deltas changes neither the text nor its end.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from motet.errors import AnswerParserError
from motet.text.detokenize import LOOK_BACK, MAX_WITHOUT_TEXT, Detokenizer
from motet.text.parts import AnswerFormat, Part, merged
from motet.text.stop_strings import StopMatcher, StopStrings
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, ChoiceStart, Finish, FinishReason, TokenLogprob


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a request for the text of its choices."""

    stops: StopStrings | None = None
    """Stop strings, compiled once for all choices of a request; None if there are none."""
    include_stop_str_in_output: bool = False
    """True if the stop string, and the text of a stop token, are part of the answer."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Minimum number of output tokens before a stop string ends a choice."""
    logprobs: bool = False
    client_sent_output: bool = False
    """True if the client sent the output tokens that choices start with. Events leave these tokens out, even if
    their text was held back, and counts do not include them."""
    prompt_only: bool = False
    """True if only the prompt was requested: a choice ends before its first token."""
    capped: bool = False
    """True if choices have a lower maximum number of tokens than the request states, because no more fit."""
    format: AnswerFormat | None = None
    """Format whose parts are separated; None if the text is shown unchanged."""


CAPPED: Final = "max_tokens_capped"
"""The `stop_reason` of a choice that has reached a lower maximum number of tokens than the request states."""


class WorkerReason(StrEnum):
    """A `stop_reason` that is neither a stop string nor a stop token, but a third-party worker's reason."""

    REPETITION = "repetition"
    PARSE_ERROR = "parse_error"


class WeightSpan(msgspec.Struct, frozen=True):
    """Consecutive output tokens [start, end) of a choice that were generated with weights of one version."""

    version: str
    start: int
    end: int


class ChoiceEvent(msgspec.Struct, frozen=True, gc=False):
    """What a step adds to the answer of a choice. The texts of all its events, joined, are the answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """New tokens, including tokens whose text was cut off at a stop string, as in vLLM."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Log-probability of each of `token_ids`, except tokens that were generated before the choice was resumed."""
    offsets: tuple[int, ...] | None = None
    """Start of each of these tokens' texts in the answer, in characters. Texts that were cut off count too."""
    finish: FinishReason | None = None
    """Set only on the last event of a choice."""
    stop_reason: str | int | None = None
    """Stop string, or token of `stop_token_ids`, that ended the choice."""
    parts: tuple[Part, ...] | None = None
    """Parts in `text` and in text that the parser held back before; None if parts are not separated. Can be empty
    although there is text, because the parser holds back text that can still become a tag."""
    weight_versions: tuple[WeightSpan, ...] = ()
    """The weight versions that generated the tokens. Set only in the last event; empty if there are no tokens."""


class ChoiceStream:
    """Takes the deltas of one choice. A resumed choice continues as if it had been fed its output tokens.

    The log-probabilities of these tokens are unknown, so events leave them out. If these tokens end with a stop string,
    the choice has ended: their engine was lost before it received the request to stop. Raises `AnswerParserError` if
    the parser fails."""

    def __init__(self, start: ChoiceStart, prompt: Sequence[int], *, tokenizer: Tokenizer, rules: TextRules) -> None:
        self.index = start.index
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        begin = replay_from(start.output_tokens, tokenizer.special_ids, rules=rules)
        self.num_tokens = begin
        """Number of tokens of the answer, up to the token that ended it."""
        self._rules = rules
        past = (*prompt[-LOOK_BACK:], *start.output_tokens[max(0, begin - LOOK_BACK) : begin])
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=rules.skip_special_tokens,
            after=past,
            visible=rules.format.visible if rules.format else frozenset(),
        )
        self._matcher = StopMatcher(rules.stops) if rules.stops else None
        self._parser = rules.format.parser() if rules.format else None
        self._held = HeldTokens()
        self._quick = False
        """True if a single token can take the fast path: no token waits for its text, and none needs an offset."""
        self._shown = 0
        """Number of characters of the answer that events have shown."""
        self._num_known = 0
        """Number of held tokens that events leave out, because the client sent them."""
        self.feed(ChoiceDelta(self.index, start.output_tokens[begin:]))  # its text was shown before
        self._num_known = self._held.num_tokens if rules.client_sent_output else 0

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def num_chars(self) -> int:
        """Number of characters of the text that was read, including text that is held back. Correct only with
        log-probabilities."""
        return self._held.num_chars

    @property
    def last_event(self) -> ChoiceEvent:
        """The end of a choice that has ended, without text."""
        return ChoiceEvent(self.index, "", (), finish=self.finish, stop_reason=self.stop_reason)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.reasoning_tokens

    def feed(self, delta: ChoiceDelta) -> ChoiceEvent | None:
        """Takes the tokens of a step. Returns None if there is nothing to show yet. Ignores tokens after the end."""
        ids = delta.token_ids
        if self._quick and len(ids) == 1 and delta.finish is None:
            self.num_tokens += 1
            piece = self._detokenizer.feed(ids[0])
            if piece and (self._matcher is None or self._matcher.passes_unchanged(piece)):
                shown = ChoiceEvent(self.index, piece, ids)
                return shown if self._parser is None else self._parsed(shown)
            self._held.add(ids[0], None)
            text = self._show(piece) if piece else ""
            event = self._parsed(self._event(text)) if text or self.ended else None
        else:
            event = self._feed_any(delta)
        self._quick = not (self._rules.logprobs or self.ended or self._held.waiting)
        return event

    def _feed_any(self, delta: ChoiceDelta) -> ChoiceEvent | None:
        """Takes any delta. A parser gets the tokens one by one, so neither the parts nor the number of reasoning tokens
        depend on how the engine bundles tokens."""
        if self.ended:
            return None
        if self._rules.prompt_only and delta.token_ids:
            self.finish = FinishReason.LENGTH
            return self._event("")
        if self._parser is None or len(delta.token_ids) <= 1:
            return self._parsed(self._take(delta))
        return _joined(list(map(self.feed, delta.single_tokens())))

    def _take(self, delta: ChoiceDelta) -> ChoiceEvent | None:
        """Returns one event for all tokens of a delta, or None."""
        ids, logprobs = delta.token_ids, delta.logprobs
        ending, text = self._without_text(delta), ""
        for number in range(len(ids) - len(ending)):
            self.num_tokens += 1
            self._held.add(ids[number], logprobs[number] if logprobs else None)
            if piece := self._detokenizer.feed(ids[number]):
                text += self._show(piece)
                if self.ended:
                    return self._event(text)
        if delta.finish is not None:
            return self._end(text, delta.finish, ending=ending, logprobs=logprobs)
        return self._event(text) if text else None

    def _without_text(self, delta: ChoiceDelta) -> tuple[int, ...]:
        """Returns the end-of-sequence or stop token that ended the choice, whose text is not part of the answer."""
        finish = delta.finish
        if finish is None or finish.reason is not FinishReason.STOP or self._rules.include_stop_str_in_output:
            return ()
        if finish.worker_reason is not None:
            return ()
        return delta.token_ids[-1:]

    def _show(self, piece: str) -> str:
        """Adds `piece`, and returns the text that can now be shown. Sets `finish` if the piece completes a stop
        string."""
        waiting = self._held.waiting
        exact = self._rules.logprobs and len(waiting) > 1
        starts = self._detokenizer.starts([token_id for token_id, _ in waiting], piece) if exact else ()
        self._held.advance(len(piece), starts)
        if self._matcher is None:
            self._shown += len(piece)
            return piece
        released = self._matcher.feed(piece, may_stop=self.num_tokens > self._rules.min_tokens)
        text = released.text
        if released.stop is not None:
            self.finish, self.stop_reason = FinishReason.STOP, released.stop
            if self._rules.include_stop_str_in_output:
                text += released.stop
        self._shown += len(text)
        return text

    def _end(
        self, text: str, finish: Finish, *, ending: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None
    ) -> ChoiceEvent:
        """Returns the last event, when the engine has ended the choice: held text, then the token without text."""
        if piece := self._detokenizer.close():
            text += self._show(piece)
        if not self.ended:
            if self._matcher is not None:
                rest = self._matcher.close()
                self._shown += len(rest)
                text += rest
            self.finish, self.stop_reason = finish.reason, finish.stop_token_id
            if finish.worker_reason is not None:
                self.stop_reason = WorkerReason(finish.worker_reason)
            elif finish.reason is FinishReason.LENGTH and self._rules.capped:
                self.stop_reason = CAPPED
        for token_id in ending:
            self.num_tokens += 1
            self._held.add(token_id, logprobs[-1] if logprobs else None)
        return self._event(text)

    def _event(self, text: str) -> ChoiceEvent:
        if self.finish is not None:
            self._held.advance(0)
        tokens = self._held.take(self._shown if self.finish is None else self._held.num_chars)
        if self._num_known:
            tokens, self._num_known = tokens[self._num_known :], max(0, self._num_known - len(tokens))
        ids, logprobs, offsets = tuple([token.token_id for token in tokens]), None, None
        if self._rules.logprobs:
            logprobs = tuple([token.logprob for token in tokens if token.logprob is not None])
            offsets = tuple([token.start for token in tokens if token.logprob is not None])
        return ChoiceEvent(self.index, text, ids, logprobs, offsets, self.finish, self.stop_reason)

    def _parsed(self, event: ChoiceEvent | None) -> ChoiceEvent | None:
        """Adds the parts to an event, if they are separated."""
        parser = self._parser
        if event is None or parser is None:
            return event
        finish = event.finish
        try:
            parts = parser.feed(event.text, event.token_ids)
            if finish is not None:
                cut = finish is not FinishReason.STOP or event.stop_reason is not None
                parts = parts + parser.close(cut=cut)
                if finish is FinishReason.STOP and parser.called:
                    finish = FinishReason.TOOL_CALLS
        except Exception as error:
            raise AnswerParserError(f"the answer of choice {event.index} could not be read: {error!r}") from error
        return msgspec.structs.replace(event, finish=finish, parts=merged(parts) if len(parts) > 1 else tuple(parts))


def replay_from(output: tuple[int, ...], special_ids: frozenset[int], *, rules: TextRules) -> int:
    """Returns the number of output tokens that need not be read again, since neither an incomplete character nor an
    incomplete stop string can reach back to them. It is 0 if all tokens have to be read: offsets of log-probabilities
    count from the start of the answer, and a parser reads complete answers."""
    if rules.logprobs or rules.format is not None:
        return 0
    begin = len(output)
    needed = MAX_WITHOUT_TEXT + 4 * (rules.stops.longest if rules.stops else 0)  # a character has at most 4 tokens
    skipped = special_ids if rules.skip_special_tokens else frozenset[int]()
    while begin and needed:
        begin -= 1
        needed -= output[begin] not in skipped
    return begin


class HeldToken(msgspec.Struct, frozen=True):
    """A token whose text starts at `start` in the answer, and is complete with the character before `end`. Tokens that
    form a character together have the same range."""

    token_id: int
    logprob: TokenLogprob | None
    start: int
    end: int


class HeldTokens:
    """Keeps tokens until their text is shown, so that events show ids, log-probabilities and text together."""

    def __init__(self) -> None:
        self.num_chars = 0
        """Number of characters of the answer so far, including characters that are held back."""
        self.waiting: list[tuple[int, TokenLogprob | None]] = []
        """Tokens whose text is not complete yet."""
        self._held: deque[HeldToken] = deque()

    @property
    def num_tokens(self) -> int:
        return len(self._held) + len(self.waiting)

    def add(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.waiting.append((token_id, logprob))

    def advance(self, num_chars: int, starts: Sequence[int] = ()) -> None:
        """Assigns the next `num_chars` characters to all tokens that wait for their text. `starts`: where the text of
        each of them starts in these characters; empty if it is not used."""
        start, self.num_chars = self.num_chars, self.num_chars + num_chars
        each = zip(self.waiting, starts or [0] * len(self.waiting), strict=True)
        self._held.extend(
            [HeldToken(token_id, logprob, start + own, self.num_chars) for (token_id, logprob), own in each]
        )
        self.waiting.clear()

    def take(self, shown: int) -> list[HeldToken]:
        """Returns the tokens whose text is within the first `shown` characters, without tokens returned before."""
        if shown == self.num_chars:
            taken = list(self._held)
            self._held.clear()
            return taken
        taken = []
        while self._held and self._held[0].end <= shown:
            taken.append(self._held.popleft())
        return taken


def _joined(shown: Sequence[ChoiceEvent | None]) -> ChoiceEvent | None:
    """Returns consecutive events of a choice as one event."""
    events = [event for event in shown if event is not None]
    if not events:
        return None
    last = events[-1]
    return msgspec.structs.replace(
        last,
        text="".join(event.text for event in events),
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        logprobs=None if last.logprobs is None else tuple(one for event in events for one in event.logprobs or ()),
        offsets=None if last.offsets is None else tuple(one for event in events for one in event.offsets or ()),
        parts=merged([part for event in events for part in event.parts or ()]),
    )
