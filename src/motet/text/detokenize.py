"""Makes text of the tokens of one answer, one at a time, however characters are cut into tokens.

Most tokens are whole characters, and their text is looked up in a table (`TokenTexts`). Where a character is cut, the
library's `DecodeStream` gives the text once it is whole. This module adds what `DecodeStream` lacks: a `close` that
returns held text, a start in the middle of a text or of a character, and a bound on the work for tokens that never
become characters.

    ids     ... p p p p | t t | t t t t      p  context: tells `DecodeStream` what stands before (it decides about a
            context       text   held           leading space), gives no text
            already seen  given  no text yet

The text of an answer is decode(prompt + answer) without the prompt's text; a character that begins in the prompt's
last tokens belongs to the answer.
"""

from collections.abc import Sequence
from itertools import takewhile

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from motet.text.tokenizer import REPLACEMENT, Tokenizer

LOOK_BACK = 64
"""Number of earlier ids that are read to start in the middle of a text; a character is 4 tokens at most."""
CONTEXT = 8
"""Number of earlier ids that `DecodeStream` gets as context."""
STUCK = 16
"""After this many ids without text they are taken for bad bytes: no character needs this many."""


class Detokenizer:
    """`feed` every token in turn, then `close` once; all that they return, joined, is the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """`after`: the ids before the first one fed; only the last `LOOK_BACK` of them matter. `visible`: special
        tokens that are shown nevertheless; if one comes inside a character, that character's bytes are bad."""
        self._backend: Backend = tokenizer.backend
        self._texts = tokenizer.texts
        self._visible = {token_id: tokenizer.token_text(token_id) for token_id in visible}
        self._skipped = tokenizer.special_ids - visible if skip_special_tokens else frozenset[int]()
        self._context, begun = self._split(after[-LOOK_BACK:])
        self._held: list[int] = []
        self._stream: DecodeStream | None = None
        """The stream that knows the context and what is held; made when it is needed."""
        self._before = ""
        for token_id in begun:
            self.feed(token_id)
        self._before = self._text_after(self._context, self._held) if self._held else ""
        """The text of the prompt's last tokens by themselves, if they begin a character: not part of the answer."""

    def feed(self, token_id: int) -> str:
        """Takes one token and returns the text that is whole by now, often none."""
        if self._context and not self._held and (text := self._texts[token_id]):
            self._context, self._stream = [token_id], None
            return text
        if token_id in self._visible:
            text = self.close() + self._visible[token_id]
            self._context, self._stream = [token_id], None
            return text
        return "" if token_id in self._skipped else self._feed_part(token_id)

    def _feed_part(self, token_id: int) -> str:
        """Takes a token that may be part of a character."""
        held = self._held
        held.append(token_id)
        if self._stream is None:
            self._stream = DecodeStream(ids=self._context, skip_special_tokens=False)  # tokens to skip do not come here
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # the library raises if text that it gave before would now be another
            return self._answers(self._restart())
        if text is not None:
            self._context, self._held = held, []
            return self._answers(text) if self._before else text
        return self._unstick() if len(held) % STUCK == 0 else ""

    def close(self) -> str:
        """Returns the text of what is held when the answer is over, with U+FFFD for bytes that are no character."""
        held, self._held = self._held, []
        return self._answers(self._text_after(self._context, held)) if held else ""

    def _answers(self, text: str) -> str:
        """Returns the first `text` of the answer without the text of the prompt's last tokens."""
        before, self._before = self._before, ""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
        return text[sum(1 for _ in same) :]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _text_after(self, context: list[int], ids: list[int]) -> str:
        before, whole = self._decode(context), self._decode(context + ids)
        return whole[len(before) :] if whole.startswith(before) else self._decode(ids)

    def _split(self, past: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns a context that ends in a whole character, and the ids after it, which begin one.

        A context that ends in U+FFFD makes `DecodeStream` give the context's text again.
        """
        if past and self._texts[past[-1]]:
            return [past[-1]], []
        past = [token_id for token_id in past if token_id not in self._skipped]
        for end in range(len(past), 0, -1):
            context = past[max(0, end - CONTEXT) : end]
            text = self._decode(context)
            if text and not text.endswith(REPLACEMENT):
                return context, past[end:]
        return [], past

    def _restart(self) -> str:
        """Begins again after a bad byte. With byte fallback it spoils good bytes before it, whose text stays."""
        text = self._text_after(self._context, self._held)
        self._context, self._held, self._stream = self._held, [], None
        return text

    def _unstick(self) -> str:
        """Returns the held text without the last tokens, which may still begin a character.

        A cut is clean where both sides decode by themselves to what they decode to together. The new stream begins
        with the tail, which starts in a bad byte and so has no leading space to lose.
        """
        held, whole = self._held, self._text_after(self._context, self._held)
        if not whole:
            self._held, self._stream = [], None
            return ""
        for size in range(1, 5):
            head, tail = held[:-size], held[-size:]
            text = self._text_after(self._context, head)
            if text + self._decode(tail) == whole:
                self._context, self._held, self._stream = [], [], None
                return self._answers(text) + "".join(map(self.feed, tail))
        return ""
