"""Follows the texts of control tokens in a client's messages through the chat template.

1. `ClientTexts.marked` puts `MARK` after the first character of each text of a control token in the client's strings,
   and of the start of such a text where another string, or a replacement by the template, could complete it.
2. The template is rendered, and the marks move with the client's texts.
3. `ClientTexts.prompt` removes the marks, and notes which texts of control tokens had one.

Strings without such texts get no marks, so that their prompts are rendered as if there were no marks at all."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from jinja2 import nodes

from motet.errors import RequestError
from motet.text.rendering.control_tokens import ControlTokens
from motet.text.rendering.jinja import Arguments, ChatEnvironment

MARK: Final = "\udfff"
"""A lone surrogate: no valid text has it, and for templates it is neither white space nor a letter."""
MAX_MARKS: Final = 2**17
"""Maximum number of marks in one request. The work for a million stops all other threads for more than 100 ms."""
ESCAPED_MARK: Final = r"\udfff"
"""The mark in JSON of ASCII characters."""


class RenderedPrompt(NamedTuple):
    text: str
    as_text: frozenset[int] | None = None
    """Starts of the texts of control tokens that are the client's; None if all such texts are control tokens."""


class ClientTexts:
    """The texts of clients in prompts of one template."""

    def __init__(self, tokens: ControlTokens, source: str) -> None:
        self._control = control = tokens.texts
        self._without_marks = frozenset[int]() if tokens.needs_aliases else None
        self._replaced = replaced_texts(source)
        self._escapes = "ensure_ascii" in source
        kept = [text for text in self._replaced or () if not control.can_end_in(text)]
        patterns = [*sorted(kept, key=len, reverse=True), *sorted(control.first_chars)]
        self._starts = re.compile("|".join(map(re.escape, patterns)))
        """Finds the characters with which control tokens start, except inside texts that the template replaces as a
        whole: with a mark, it would not find them."""

    def marked(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Returns the variables with marks; the same object if there are none. Raises RequestError if a string has
        the mark itself."""
        texts = _strings(variables)
        left = MAX_MARKS
        for text in texts:
            if any(char in text for char in self._control.first_chars):
                left -= self._num_marks(text, at_most=left + 1)
                if left < 0:
                    what = "texts of control tokens, or characters with which such texts start"
                    raise RequestError(f"messages and tools can have at most {MAX_MARKS} {what}", param="messages")
        if left == MAX_MARKS:
            return variables
        for text in texts:
            if MARK in text or (self._escapes and ESCAPED_MARK in text):
                raise RequestError(f"messages is not valid Unicode: it has {ESCAPED_MARK}", param="messages")
        marked: dict[str, Any] = self._marked(variables)
        return marked

    def prompt(self, rendered: str, *, is_marked: bool) -> RenderedPrompt:
        """Returns the prompt for a rendered text. `is_marked`: True if the variables had marks."""
        if not is_marked:
            return RenderedPrompt(rendered, self._without_marks)
        if self._escapes:
            rendered = rendered.replace(ESCAPED_MARK, MARK)
        first, *pieces = rendered.split(MARK)
        text, position, as_text = "".join([first, *pieces]), len(first), set[int]()
        for piece in pieces:
            if self._control.is_at(text, position - 1):
                as_text.add(position - 1)
            position += len(piece)
        return RenderedPrompt(text, frozenset(as_text))

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._with_marks(value)
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        if isinstance(value, dict):
            items = [(self._marked(key), self._marked(item)) for key, item in value.items()]
            return (Arguments if isinstance(value, Arguments) else dict)(items)
        return value

    def _num_marks(self, text: str, *, at_most: int) -> int:
        """Returns the number of marks that a text gets, or `at_most` if it gets more."""
        if self._marks_all_starts(text):
            # Includes characters that get no mark, because they start a text that the template replaces.
            return min(at_most, sum(map(text.count, self._control.first_chars)))
        num_found = sum(1 for _ in islice(self._control.find(text), at_most))
        return min(at_most, num_found + (self._control.unfinished(text) is not None))

    def _marks_all_starts(self, text: str) -> bool:
        """Returns True if a replacement by the template could complete the text of a control token."""
        return self._replaced is None or any(replaced in text for replaced in self._replaced)

    def _with_marks(self, text: str) -> str:
        """Returns the text with marks; the same object if it gets none."""
        if self._marks_all_starts(text):
            return self._starts.sub(lambda found: found[0] + MARK if len(found[0]) == 1 else found[0], text)
        starts = [start for start, _ in self._control.find(text)]
        if (unfinished := self._control.unfinished(text)) is not None:
            starts.append(unfinished)
        if not starts:
            return text
        ends = [start + 1 for start in starts]
        pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        return MARK.join(pieces)


def without_marks(text: str) -> str:
    return text.replace(MARK, "").replace(ESCAPED_MARK, "")


def replaced_texts(source: str) -> list[str] | None:
    """Returns the texts that a template replaces in other texts: the texts around such a text can form a control
    token. None if they are not known. Raises jinja2's TemplateSyntaxError."""
    if "replace" not in source:
        return []
    replacing = list(_replacing(ChatEnvironment().parse(source)))
    known = [text.value for text in replacing if isinstance(text, nodes.Const) and isinstance(text.value, str)]
    return known if len(known) == len(replacing) else None


def _replacing(template: nodes.Template) -> Iterator[nodes.Node | None]:
    """Yields the first argument of each replacement; None if it is not given by its position."""
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "replace":
            yield call.args[0] if call.args else None
    for used in template.find_all(nodes.Filter):
        if used.name == "replace":
            yield used.args[0] if used.args else None


def _strings(value: object) -> list[str]:
    strings, values = list[str](), [value]
    for inner in values:  # grows while it is read
        if type(inner) is str:
            strings.append(inner)
        elif isinstance(inner, dict):
            strings.extend(inner)
            values.extend(inner.values())
        elif isinstance(inner, list):
            values.extend(inner)
    return strings
