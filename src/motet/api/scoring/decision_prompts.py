"""The prompts of questions about one input: the chat template is rendered once, with a placeholder for the question.

    rendered   <|im_start|>user\\nThe parcel arrived late and\\n\\nPLACEHOLDER<|im_end|>\\n<|im_start|>assistant\\n
               '------------- before ------------'           '--------------- after ----------------'
    prompts    before + question + after
    answers    the tokens that a text adds at the end of a prompt

The text before the question is tokenised once, up to a space between two of its last words. The rest of it is tokenised
with each question, because one token can contain the end of it and the start of the question. The first prompt is also
tokenised as one text: if its tokens differ, all prompts are tokenised as one text."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from motet.api.scoring.answer_reads import Tokens
from motet.errors import RequestError
from motet.text.prepare import PromptPreparer
from motet.text.rendering.client_texts import RenderedPrompt
from motet.text.rendering.control_tokens import ControlTexts

PLACEHOLDER = '\ue000MOTET-"QUESTION"-HERE\ue000'
"""Replaced by the questions after the template is rendered. The first and the last character are for private use. The
quotes detect templates that escape messages, which would escape quotes in questions too: they are refused. So are
inputs that contain the placeholder."""
MIN_RETOKENIZED_CHARS = 64
"""Minimum number of characters before the question that are tokenised with each question."""
MAX_SPACES = 1000
"""Maximum number of spaces that are tried as the end of the part that is tokenised once."""


class PromptText(NamedTuple):
    """A text, and the positions in it at which the text of a control token is plain text. None if all such texts are
    control tokens."""

    text: str
    as_text: Set[int] | None

    def part(self, start: int, end: int | None = None) -> "PromptText":
        """Returns the text [start, end)."""
        end = len(self.text) if end is None else end
        inside = None if self.as_text is None else {at - start for at in self.as_text if start <= at < end}
        return PromptText(self.text[start:end], inside)


def joined(*parts: PromptText) -> PromptText:
    """Returns the texts as one text."""
    as_text, length = set[int](), 0
    for part in parts:
        as_text.update(length + at for at in part.as_text or ())
        length += len(part.text)
    text = "".join(part.text for part in parts)
    return PromptText(text, None if all(part.as_text is None for part in parts) else as_text)


class QuestionPrompts:
    """Tokenises the questions about one input, and their answers. Its methods can run in any thread."""

    def __init__(
        self, preparer: PromptPreparer, rendered: RenderedPrompt, *, control: ControlTexts | None, param: str
    ) -> None:
        """`control`: the texts of control tokens, which are plain text in questions; None if they are control tokens
        there. `param`: the field with the input. Raises `RequestError` if the template changes the placeholder."""
        full = PromptText(*rendered)
        start = full.text.find(PLACEHOLDER)
        if full.text.count(PLACEHOLDER) != 1:
            why = "the model's chat template changes or repeats the texts of messages, so no question can be added"
            raise RequestError(f"Invalid '{param}': {why}.", param=param, code="unsupported_value")
        self._preparer = preparer
        self._param = param
        self._control = control
        self._no_positions: Set[int] | None = None if full.as_text is None else frozenset()
        self._before, self._after = full.part(0, start), full.part(start + len(PLACEHOLDER))
        self._rest = self._before
        """The end of the text before the question, which is tokenised with each question."""
        self._shared: list[int] = []
        """The tokens of the text before `_rest`."""
        self._after_ids = self._tokens(self._after)
        self._answer_ids: dict[str, Tokens] = {}
        """The tokens of answers, by their texts."""

    def start(self, first: str) -> list[int]:
        """Finds the part of the prompts that is tokenised once. Returns the tokens of the prompt for a first
        question."""
        complete = self._tokens(joined(self._before, self._client_text(first), self._after))
        if cut := shared_length(self._before.text):
            shared, rest = self._tokens(self._before.part(0, cut)), self._before.part(cut)
            if shared + self._tokens(joined(rest, self._client_text(first), self._after)) == complete:
                self._shared, self._rest = shared, rest
        return complete

    @property
    def num_shared(self) -> int:
        """Number of tokens that are the same in all prompts."""
        return len(self._shared)

    def num_chars(self, question: str, answers: Sequence[str]) -> int:
        """Returns the number of characters that are tokenised for a question and its answers."""
        after, answered = len(self._after.text), sum(map(len, answers))
        return len(self._rest.text) + len(question) + answered + after * (1 + len(answers))

    def prompt(self, question: str) -> Tokens:
        """Returns the tokens of the prompt for a question."""
        rest = self._tokens(joined(self._rest, self._client_text(question), self._after))
        return (*self._shared, *rest)  # all prompts refer to the same int objects

    def answer(self, text: str, *, param: str) -> Tokens:
        """Returns the tokens that an answer adds at the end of a prompt. If it would change the last tokens of the
        prompt, it is tokenised alone. `param`: the field with the answer. Raises `RequestError` for tokens that the
        model does not have."""
        if (answer := self._answer_ids.get(text)) is None:
            ids, length = self._tokens(joined(self._after, self._client_text(text))), len(self._after_ids)
            added = ids[length:] if ids[:length] == self._after_ids else self._tokens(self._client_text(text))
            self._preparer.check_prompt(added, param=param)
            answer = self._answer_ids[text] = tuple(added)
        return answer

    def _tokens(self, part: PromptText) -> list[int]:
        return self._preparer.text_prompt(part.text, False, param=self._param, as_text=part.as_text)

    def _client_text(self, text: str) -> PromptText:
        """Returns a client's text, in which the texts of control tokens are plain text."""
        starts = frozenset(start for start, _ in self._control.find(text)) if self._control is not None else None
        return PromptText(text, starts or self._no_positions)


def shared_length(text: str) -> int:
    """Returns the position of a space between two words near the end of a text; 0 if there is none. Tokenizers split
    texts there: no token contains the end of a word and the space after it."""
    end = max(0, len(text) - MIN_RETOKENIZED_CHARS)
    for _ in range(MAX_SPACES):
        end = text.rfind(" ", 1, end)
        if end < 1:
            return 0
        if text[end - 1].isalnum() and text[end + 1].isalnum():
            return end
    return 0


def with_placeholder(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Returns the messages of a chat with the placeholder at the end of the last one, or in a new message of the user
    if the last one is not the user's."""
    last = messages[-1]
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": PLACEHOLDER}]
    content = f"{last['content']}\n\n{PLACEHOLDER}" if last["content"] else PLACEHOLDER
    return [*messages[:-1], {**last, "content": content}]
