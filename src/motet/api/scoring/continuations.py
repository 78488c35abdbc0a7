"""Tokenises a prompt together with each of its continuations.

    prompt      continuation   tokens
    text        text           of the joined text; the first ones, as many as the prompt alone has, are the prompt
    text        token ids      of the prompt, then the ids
    token ids   text           the ids, then the tokens of the text without special tokens
    token ids   token ids      the ids of both

For two texts, white space at the end of the prompt belongs to the continuation, because tokenizers join it with the
next word. This is the rule of lm-evaluation-harness (`_encode_pair`), so the scores are comparable. A chat is a text.
"""

import asyncio
from collections.abc import Container, Sequence
from functools import partial
from typing import NamedTuple

from motet.api.generation.plan import check_prompt_logprobs
from motet.api.generation.prompts import Prompt, token_ids, work_pieces
from motet.api.http.caller import Caller
from motet.api.http.failure import FieldError, invalid_type, invalid_value
from motet.text.prepare import PromptPreparer

PARAM = "continuations"
MAX_JOINED_CHARS = 2**24
"""Maximum number of characters of all joined texts. The prompt is tokenised again with each continuation, which takes
0.5 s for a million characters. A limit of tokens is not enough, because some long texts have few tokens."""


class ScoredText(NamedTuple):
    """A prompt that is not tokenised yet."""

    text: str
    add_special_tokens: bool
    param: str
    """The field with the prompt, for errors."""
    as_text: Container[int] | None = None
    """Positions at which the text of a control token is plain text (`Tokenizer.encode`)."""

    def tokens(self, preparer: PromptPreparer, continuation: str = "") -> list[int]:
        """Returns the tokens of the prompt followed by a continuation."""
        return preparer.text_prompt(
            self.text + continuation, self.add_special_tokens, param=self.param, as_text=self.as_text
        )

    def without_trailing_space(self) -> tuple["ScoredText", str]:
        """Returns the prompt without the white space at its end, and that white space."""
        text = self.text.rstrip()
        return self._replace(text=text), self.text[len(text) :]


class ScoredPrompt(NamedTuple):
    """The tokens of a prompt and one continuation."""

    ids: Sequence[int]
    first: int
    """Index of the continuation's first token."""


def parse_continuations(value: object) -> tuple[Prompt, ...]:
    """Parses a list of strings and of lists of token ids, none of which is empty."""
    if not isinstance(value, list):
        raise FieldError(invalid_type, None, "an array of strings, or of arrays of token ids")
    if not value:
        raise FieldError(invalid_value, None, "the array is empty, and must have at least one continuation")
    for number, item in enumerate(value):
        if not isinstance(item, str | list):
            raise FieldError(invalid_type, number, "a string or an array of token ids")
        if not item:
            raise FieldError(invalid_value, number, "it is empty, and must have at least one token")
    return tuple(item if isinstance(item, str) else token_ids(item, number) for number, item in enumerate(value))


async def scored_prompts(
    preparer: PromptPreparer,
    prompt: ScoredText | Sequence[int],
    *,
    continuations: Sequence[Prompt],
    param: str,
    caller: Caller,
) -> list[ScoredPrompt]:
    """Returns the tokens of the prompt with each continuation. `param`: the field with the prompt. Raises
    `RequestError` for tokens that the model does not have, and for too many."""
    joiner = PromptJoiner(preparer, param)
    await caller.in_thread_if_long(partial(joiner.start, prompt, continuations), max(caller.work_size, _size(prompt)))
    check_prompt_logprobs(joiner.min_tokens * len(continuations), 0, prompt_param=PARAM)
    sizes = [_size(prompt) + len(continuation) for continuation in continuations]
    if isinstance(prompt, ScoredText) and sum(sizes) > MAX_JOINED_CHARS:
        why = f"with the prompt before each, they have {sum(sizes)} characters; the maximum is {MAX_JOINED_CHARS}"
        raise invalid_value(PARAM, f"{why}; send fewer continuations")
    found: list[ScoredPrompt] = []
    for piece in work_pieces(sizes):

        def of_piece(piece: range = piece) -> list[ScoredPrompt]:
            return [joiner.with_continuation(continuations[number], number) for number in piece]

        found += await caller.in_thread_if_long(of_piece, sum(sizes))
        await asyncio.sleep(0)  # other tasks run, also if the body is short
    return found


def _size(prompt: ScoredText | Sequence[int]) -> int:
    return len(prompt.text) if isinstance(prompt, ScoredText) else len(prompt)


class PromptJoiner:
    """Tokenises one prompt with each of its continuations."""

    def __init__(self, preparer: PromptPreparer, param: str) -> None:
        self._preparer = preparer
        self._param = param
        self._text: ScoredText | None = None
        """The prompt without white space at its end; None for token ids."""
        self._space = ""
        """The white space at the end of the prompt."""
        self._stripped_ids: list[int] = []
        """The tokens of the prompt without white space at its end."""
        self._ids: list[int] = []
        """The tokens of the complete prompt."""

    def start(self, prompt: ScoredText | Sequence[int], continuations: Sequence[Prompt]) -> None:
        """Reads the prompt. It is tokenised with and without white space at its end, if continuations need both."""
        if not isinstance(prompt, ScoredText):
            self._ids = [*prompt]
            self._preparer.check_prompt(self._ids, param=self._param)
            return
        if any(isinstance(continuation, str) for continuation in continuations):
            self._text, self._space = prompt.without_trailing_space()
            self._stripped_ids = self._text.tokens(self._preparer)
            if not self._stripped_ids:
                why = "it has no tokens before the white space at its end, and the first token of a prompt has no score"
                raise invalid_value(self._param, why)
        if self._space or self._text is None:
            self._ids = prompt.tokens(self._preparer)
            self._preparer.check_prompt(self._ids, param=self._param)
        else:
            self._ids = self._stripped_ids

    @property
    def min_tokens(self) -> int:
        """Minimum number of tokens of the prompt with any continuation."""
        return min(len(self._ids), len(self._stripped_ids)) if self._text is not None else len(self._ids)

    def with_continuation(self, continuation: Prompt, number: int) -> ScoredPrompt:
        """Returns the tokens of the prompt and a continuation. `number`: index of the continuation, for errors."""
        param = f"{PARAM}[{number}]"
        if isinstance(continuation, str) and self._text is not None:
            return self._joined_text(continuation, param)
        ids: Sequence[int] = continuation if not isinstance(continuation, str) else self._encoded(continuation, param)
        self._preparer.check_prompt(ids, param=param)
        return ScoredPrompt((*self._ids, *ids), len(self._ids))

    def _encoded(self, text: str, param: str) -> list[int]:
        return self._preparer.text_prompt(text, False, param=param)

    def _joined_text(self, continuation: str, param: str) -> ScoredPrompt:
        assert self._text is not None
        text, prompt = self._text._replace(param=param), self._stripped_ids
        ids = text.tokens(self._preparer, self._space + continuation)
        if len(ids) <= len(prompt):
            why = "the prompt with it has no more tokens than the prompt alone"
            raise invalid_value(param, f"{why}; start it with a space, or send token ids")
        self._preparer.check_prompt(ids, param=param)
        if ids[: len(prompt)] == prompt:  # saves memory: all lists refer to the same int objects
            ids = prompt + ids[len(prompt) :]
        return ScoredPrompt(ids, len(prompt))
