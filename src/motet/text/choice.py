"""The text of one choice: tokens in, events out.

    delta ─► Detokenizer ─► StopMatcher ─► event
             holds parts    holds what may
             of characters  become a stop string

A token stands in the event that shows the last of its text, with its log-probability; so the events of a choice are
consistent wherever the stream is cut. Everything is done token by token: how an engine bundles tokens into deltas
changes neither the text nor where it ends.
"""

from collections.abc import Sequence

import msgspec

from motet.text.detokenize import LOOK_BACK, STUCK, Detokenizer
from motet.text.pace import TokenPace
from motet.text.parts import AnswerFormat, Part
from motet.text.stop import StopMatcher, StopStrings
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, ChoiceStart, Finish, FinishReason, TokenLogprob


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about the text of its choices."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    """Keeps the stop string, and the text of a stop token."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """A stop string counts only if its last character comes after so many tokens."""
    logprobs: bool = False
    format: AnswerFormat | None = None
    """None: the text is shown as it is."""

    def stop_strings(self) -> StopStrings | None:
        return StopStrings(self.stop) if self.stop else None


class ChoiceEvent(msgspec.Struct, frozen=True, gc=False):
    """What a choice has to show after a step. The texts of all its events, joined, are the answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Also those whose text a stop string cut off."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """If asked for: of `token_ids`, less those whose text was cut off."""
    offsets: tuple[int, ...] | None = None
    """As long as `logprobs`: where in the answer the text of each token begins."""
    finish: FinishReason | None = None
    """On the last event of a choice, and on no other."""
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended it."""
    parts: tuple[Part, ...] | None = None
    """What `text`, and what was held back before, comes to. None: it was not asked for."""


class ChoiceStream:
    """Feed it the deltas of one choice. One that starts with written tokens goes on as if it had been fed them.

    The log-probabilities of written tokens are not known to it and left out. If a stop string is among their last,
    the choice has ended: the engine that wrote them had not been told yet.
    """

    def __init__(
        self,
        start: ChoiceStart,
        prompt: Sequence[int],
        *,
        tokenizer: Tokenizer,
        rules: TextRules,
        stops: StopStrings | None,
    ) -> None:
        """`stops`: `rules.stop_strings()`, compiled once for all choices of a group."""
        self.index = start.index
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        begin = _replay_from(start.written, tokenizer.special_ids, rules, stops)
        self.num_tokens = begin
        """Tokens of the answer, up to the one that ended it."""
        self._rules = rules
        past = (*prompt[-LOOK_BACK:], *start.written[max(0, begin - LOOK_BACK) : begin])
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=rules.skip_special_tokens,
            after=past,
            visible=rules.format.visible if rules.format else frozenset(),
        )
        self._matcher = StopMatcher(stops) if stops else None
        self._plain = not rules.logprobs
        """Nobody asks where in the text a token begins."""
        self._pace = TokenPace()
        self._shown = 0
        """Characters of the answer that events have shown."""
        self.feed(ChoiceDelta(self.index, start.written[begin:]))  # what it shows was shown before

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def reasoning_tokens(self) -> int:
        """Nothing is told apart here."""
        return 0

    def feed(self, delta: ChoiceDelta) -> ChoiceEvent | None:
        """Takes what a step added; None if there is nothing to show yet. After the end, all is ignored."""
        if self.finish is not None:
            return None
        ids = delta.token_ids
        if len(ids) != 1 or delta.finish is not None or not self._plain or self._pace.waiting:
            return self._take(delta)
        # What `_take` does with most deltas: one token, whose text goes straight through.
        self.num_tokens += 1
        piece = self._detokenizer.feed(ids[0])
        if piece and (self._matcher is None or self._matcher.passes(piece)):
            return ChoiceEvent(self.index, piece, ids)
        self._pace.add(ids[0], None)
        text = self._show(piece) if piece else ""
        return self._event(text) if text or self.ended else None

    def _take(self, delta: ChoiceDelta) -> ChoiceEvent | None:
        ids, logprobs = delta.token_ids, delta.logprobs
        ending = self._without_text(delta)
        text = ""
        for number in range(len(ids) - len(ending)):
            self.num_tokens += 1
            self._pace.add(ids[number], logprobs[number] if logprobs else None)
            if piece := self._detokenizer.feed(ids[number]):
                text += self._show(piece)
                if self.ended:
                    return self._event(text)
        if delta.finish is not None:
            return self._end(text, delta.finish, ending, logprobs)
        return self._event(text) if text else None

    def _without_text(self, delta: ChoiceDelta) -> tuple[int, ...]:
        """The end-of-sequence or stop token that ended the choice: its text is not in the answer."""
        finish = delta.finish
        if finish is None or finish.reason is not FinishReason.STOP or self._rules.include_stop_str_in_output:
            return ()
        return delta.token_ids[-1:]

    def _show(self, piece: str) -> str:
        """The text that may be shown now that `piece` has come; sets `finish` if it completes a stop string."""
        self._pace.advance(len(piece))
        if self._matcher is None:
            self._shown += len(piece)
            return piece
        released = self._matcher.feed(piece, may_stop=self.num_tokens > self._rules.min_tokens)
        text = released.text
        if released.stop is not None:
            self.finish, self.stop_reason = FinishReason.STOP, released.stop
            if not self._rules.include_stop_str_in_output:
                text = text[: released.kept]
        self._shown += len(text)
        return text

    def _end(
        self, text: str, finish: Finish, ending: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None
    ) -> ChoiceEvent:
        """The engine ended the choice: shows what was held, then the token without text, if any."""
        if piece := self._detokenizer.close():
            text += self._show(piece)
        if not self.ended:
            if self._matcher is not None:
                rest = self._matcher.close()
                self._shown += len(rest)
                text += rest
            self.finish, self.stop_reason = finish.reason, finish.stop_token_id
        for token_id in ending:
            self.num_tokens += 1
            self._pace.add(token_id, logprobs[-1] if logprobs else None)
        return self._event(text)

    def _event(self, text: str) -> ChoiceEvent:
        tokens = self._pace.take(self._shown) if self.finish is None else self._pace.take_rest()
        ids = tuple([token.token_id for token in tokens])
        if not self._rules.logprobs:
            return ChoiceEvent(self.index, text, ids, None, None, self.finish, self.stop_reason)
        kept = [(t.logprob, t.start) for t in tokens if t.logprob is not None and t.within(self._shown)]
        return ChoiceEvent(
            self.index,
            text,
            ids,
            tuple([logprob for logprob, _ in kept]),
            tuple([offset for _, offset in kept]),
            self.finish,
            self.stop_reason,
        )


def _replay_from(
    written: tuple[int, ...], special_ids: frozenset[int], rules: TextRules, stops: StopStrings | None
) -> int:
    """How many written tokens need not be read again: neither a held character nor a stop string reaches behind.

    With log-probabilities, offsets count from the beginning, so all are read.
    """
    begin = len(written)
    if rules.logprobs:
        return 0
    needed = STUCK + 4 * (stops.longest if stops else 0)  # a character is 4 tokens at most
    skipped = special_ids if rules.skip_special_tokens else frozenset[int]()
    while begin and needed:
        begin -= 1
        needed -= written[begin] not in skipped
    return begin
