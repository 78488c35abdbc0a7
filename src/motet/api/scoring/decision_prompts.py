"""The prompts of questions about one input: the chat template is rendered once, with a mark in place of the question.

    rendered   <|im_start|>user\\nThe parcel arrived late and\\n\\nMARK<|im_end|>\\n<|im_start|>assistant\\n
               '------------- head --------------'    '---------------- tail ----------------'
    prompts    head + question + tail
    answers    the tokens that a text adds to the tail

All prompts start with the tokens of the head up to a space between two of its last words, which are tokenised once. The
rest of the head is tokenised with each question, since tokens can reach across their border. The first prompt is also
tokenised as one text: if its tokens are not the same, all prompts are tokenised as one text."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from motet.api.scoring.answer_reads import Tokens
from motet.errors import RequestError
from motet.text.prepare import PromptPreparer
from motet.text.rendering.client_texts import RenderedPrompt
from motet.text.rendering.control_tokens import ControlTexts

MARK = '\ue000MOTET-"QUESTION"-HERE\ue000'
"""Stands for the question while the template is rendered. The first character is for private use. A template that
changes quotes in messages is refused, because it would change quotes in questions too, and so is an input with the
mark."""
SEPARATED_CHARS = 64
"""Number of characters at the end of the head that are tokenised with each question at least."""
MAX_SPACES = 1000
"""Maximum number of spaces that are tried as the end of the shared part."""


class MarkedText(NamedTuple):
    """A text, and the starts of the texts of control tokens in it that are only text. None if none is only text."""

    text: str
    as_text: Set[int] | None

    def part(self, start: int, end: int | None = None) -> "MarkedText":
        """Returns the text [start, end)."""
        end = len(self.text) if end is None else end
        inside = None if self.as_text is None else {at - start for at in self.as_text if start <= at < end}
        return MarkedText(self.text[start:end], inside)


def joined(*parts: MarkedText) -> MarkedText:
    """Returns the texts as one text."""
    as_text, length = set[int](), 0
    for part in parts:
        as_text.update(length + at for at in part.as_text or ())
        length += len(part.text)
    text = "".join(part.text for part in parts)
    return MarkedText(text, None if all(part.as_text is None for part in parts) else as_text)


class QuestionPrompts:
    """Tokenises the questions about one input, and their answers. Its methods can run in any thread."""

    def __init__(
        self, preparer: PromptPreparer, rendered: RenderedPrompt, *, control: ControlTexts | None, param: str
    ) -> None:
        """`control`: the texts of control tokens, which are only text in questions; None if they are control tokens
        there. `param`: the field with the input. Raises `RequestError` if the template changes the mark."""
        whole = MarkedText(*rendered)
        start = whole.text.find(MARK)
        if whole.text.count(MARK) != 1:
            why = "the model's chat template changes or repeats the texts of messages, so no question can be added"
            raise RequestError(f"Invalid '{param}': {why}.", param=param, code="unsupported_value")
        self._preparer = preparer
        self._param = param
        self._control = control
        self._none_marked: Set[int] | None = None if whole.as_text is None else frozenset()
        self._head, self._tail = whole.part(0, start), whole.part(start + len(MARK))
        self._rest = self._head
        """The end of the head, which is tokenised with each question."""
        self._shared: list[int] = []
        """The tokens of the head before it."""
        self._tail_ids = self._tokens(self._tail)
        self._known: dict[str, Tokens] = {}
        """The tokens of answers, by their texts."""

    def start(self, first: str) -> list[int]:
        """Finds the part of the head that is tokenised once. Returns the tokens of the prompt for a first question."""
        complete = self._tokens(joined(self._head, self._marked(first), self._tail))
        if cut := shared_length(self._head.text):
            shared, rest = self._tokens(self._head.part(0, cut)), self._head.part(cut)
            if shared + self._tokens(joined(rest, self._marked(first), self._tail)) == complete:
                self._shared, self._rest = shared, rest
        return complete

    @property
    def num_shared(self) -> int:
        """Number of tokens that are the same in all prompts."""
        return len(self._shared)

    def num_chars(self, question: str, answers: Sequence[str]) -> int:
        """Returns the number of characters that are tokenised for a question and its answers."""
        tail, answered = len(self._tail.text), sum(map(len, answers))
        return len(self._rest.text) + len(question) + answered + tail * (1 + len(answers))

    def prompt(self, question: str) -> Tokens:
        """Returns the tokens of the prompt for a question."""
        rest = self._tokens(joined(self._rest, self._marked(question), self._tail))
        return (*self._shared, *rest)  # each number is an object, so prompts do not copy the shared ones

    def answer(self, text: str, *, param: str) -> Tokens:
        """Returns the tokens of an answer: the tokens that it adds to the tail. If it changes tokens of the tail, which
        the model has read already, it is tokenised alone. `param`: the field with the answer. Raises `RequestError` for
        tokens that the model does not have."""
        if (known := self._known.get(text)) is None:
            ids, length = self._tokens(joined(self._tail, self._marked(text))), len(self._tail_ids)
            added = ids[length:] if ids[:length] == self._tail_ids else self._tokens(self._marked(text))
            self._preparer.check_prompt(added, param=param)
            known = self._known[text] = tuple(added)
        return known

    def _tokens(self, marked: MarkedText) -> list[int]:
        return self._preparer.text_prompt(marked.text, False, param=self._param, as_text=marked.as_text)

    def _marked(self, text: str) -> MarkedText:
        """Returns a client's text with the texts of control tokens in it marked as text."""
        starts = frozenset(start for start, _ in self._control.find(text)) if self._control is not None else None
        return MarkedText(text, starts or self._none_marked)


def shared_length(head: str) -> int:
    """Returns the position of a space between two words near the end of a text; 0 if there is none. Tokenizers divide
    texts there: no token has an end of a word and the space after it."""
    end = max(0, len(head) - SEPARATED_CHARS)
    for _ in range(MAX_SPACES):
        end = head.rfind(" ", 1, end)
        if end < 1:
            return 0
        if head[end - 1].isalnum() and head[end + 1].isalnum():
            return end
    return 0


def with_mark(turns: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Returns the turns of a chat with the mark for the question at the end of the user's last turn, or in a new turn
    of the user if the last turn is not the user's."""
    last = turns[-1]
    if last["role"] != "user":
        return [*turns, {"role": "user", "content": MARK}]
    content = f"{last['content']}\n\n{MARK}" if last["content"] else MARK
    return [*turns[:-1], {**last, "content": content}]
