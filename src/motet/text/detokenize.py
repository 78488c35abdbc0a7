"""Turns the tokens of one answer into text, one token at a time, even if characters are split over several tokens.

1. Most tokens consist of complete characters. Their text comes from a table (`TokenTexts`).
2. The tokens of a split character are held until `DecodeStream` of the library `tokenizers` returns its text.
3. After `MAX_WITHOUT_TEXT` held tokens without text, they count as invalid bytes (`_release_invalid`).
4. `close` returns the text of the tokens that are still held.

`DecodeStream` has no `close`, cannot start in the middle of a text or of a character, and does unlimited work for
tokens that never become characters. This module adds all three.

    ids     ... c c c c | t t | h h h h      c  context: decides about a leading space; its text is not returned again
            context       text  held         t  text was returned        h  no text yet

The text of an answer is decode(prompt + answer) without the prompt's text. A character that starts in the prompt's last
tokens belongs to the answer.
"""

from collections.abc import Sequence
from itertools import takewhile

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from motet.text.tokenizer import REPLACEMENT, Tokenizer

LOOK_BACK = 64
"""Number of earlier ids that are used to start in the middle of a text. A character has at most 4 tokens."""
CONTEXT = 8
"""Number of earlier ids that `DecodeStream` gets as context."""
MAX_WITHOUT_TEXT = 16
"""Number of ids without text after which they count as invalid bytes. No character has as many tokens."""


class Detokenizer:
    """Turns the tokens of one answer into text: `feed` every token in order, then call `close` once. The returned
    texts, joined, are the text of the answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """`after`: the ids before the first id that is fed; only the last `LOOK_BACK` are used. `visible`: special
        tokens whose text is returned even if special tokens are skipped. If such a token interrupts a character, the
        bytes of that character are invalid."""
        self._backend: Backend = tokenizer.backend
        self._texts = tokenizer.texts
        self._visible = {token_id: tokenizer.token_text(token_id) for token_id in visible}
        self._skipped = tokenizer.special_ids - visible if skip_special_tokens else frozenset[int]()
        self._context, partial = self._split(after[-LOOK_BACK:])
        self._held: list[int] = []
        self._stream: DecodeStream | None = None
        """Stream that was fed the context and the held tokens; None until it is needed."""
        self._prompt_text = ""
        for token_id in partial:
            self.feed(token_id)
        self._prompt_text = self._text_after(self._context, self._held) if self._held else ""
        """Text of the prompt's last tokens alone, if they start a character. It is not part of the answer."""

    def feed(self, token_id: int) -> str:
        """Adds one token, and returns the text that this token completes, which can be empty."""
        if self._context and not self._held and (text := self._texts[token_id]):
            self._context, self._stream = [token_id], None
            return text
        if token_id in self._visible:
            text = self.close() + self._visible[token_id]
            self._context, self._stream = [token_id], None
            return text
        return "" if token_id in self._skipped else self._feed_part(token_id)

    def _feed_part(self, token_id: int) -> str:
        """Adds a token that can be part of a character."""
        held = self._held
        held.append(token_id)
        if self._stream is None:
            # Skipped tokens do not reach the stream.
            self._stream = DecodeStream(ids=self._context, skip_special_tokens=False)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # the library raises an error if the text that it returned before would change
            return self._without_prompt_text(self._restart())
        if text is not None:
            self._context, self._held = held, []
            return self._without_prompt_text(text) if self._prompt_text else text
        return self._release_invalid() if len(held) % MAX_WITHOUT_TEXT == 0 else ""

    def close(self) -> str:
        """Returns the text of the held tokens at the answer's end, with U+FFFD for bytes that are not a character."""
        held, self._held = self._held, []
        return self._without_prompt_text(self._text_after(self._context, held)) if held else ""

    def starts(self, ids: Sequence[int], text: str) -> list[int]:
        """Returns where the texts of tokens start in the text that they completed together. All parts of a character
        start where the character does. Bytes that are not a character are characters of their own."""
        shown = [token_id for token_id in ids if token_id not in self._skipped]
        if len(shown) < 2 or REPLACEMENT not in text or len(shown) > LOOK_BACK:
            return [0] * len(ids)
        for context in (self._texts.neighbour, []):
            texts = [self._text_after(context, shown[:number]) for number in range(len(shown) + 1)]
            if texts[-1] == text:
                break
        else:  # the first characters of the tokens belong to the prompt
            return [0] * len(ids)
        starts, number, start = list[int](), 0, 0
        for token_id in ids:
            if token_id not in self._skipped:
                before, with_token = texts[number : number + 2]
                last = len(before) - (len(with_token) <= len(before))  # without a new character, the last one continues
                start, number = max(start, min(last, _num_same(before, text))), number + 1
            starts.append(start)
        return starts

    def _without_prompt_text(self, text: str) -> str:
        """Returns the first text of the answer without the text of the prompt's last tokens."""
        prompt_text, self._prompt_text = self._prompt_text, ""
        return text[_num_same(prompt_text, text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _text_after(self, context: list[int], ids: list[int]) -> str:
        before, both = self._decode(context), self._decode(context + ids)
        return both[len(before) :] if both.startswith(before) else self._decode(ids)

    def _split(self, past: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns a context that ends with a complete character, and the ids after it, which start a character. With a
        context that ends in U+FFFD, `DecodeStream` would return the context's text again."""
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
        """Starts a new stream after an invalid byte. With byte fallback, an invalid byte changes the text of valid
        bytes before it; the text that was returned for these stays."""
        text = self._text_after(self._context, self._held)
        self._context, self._held, self._stream = self._held, [], None
        return text

    def _release_invalid(self) -> str:
        """Returns the text of the held tokens, except the last ones, which can still start a character. The tokens can
        be split where the texts of both sides, decoded alone, are the text of both together. The new stream starts with
        the second side. Its first byte is invalid, so the text has no leading space that could be lost."""
        held, text_of_all = self._held, self._text_after(self._context, self._held)
        if not text_of_all:
            self._held, self._stream = [], None
            return ""
        for size in range(1, 5):
            head, tail = held[:-size], held[-size:]
            text = self._text_after(self._context, head)
            if text + self._decode(tail) == text_of_all:
                self._context, self._held, self._stream = [], [], None
                return self._without_prompt_text(text) + "".join(map(self.feed, tail))
        return ""


def _num_same(one: str, other: str) -> int:
    """Returns the number of characters with which both texts start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
