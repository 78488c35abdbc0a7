"""`tools/words.py` finds unusual turns of phrase and accepts standard English; `tools/texts.py` finds the texts."""

from pathlib import Path

import pytest

from tools.texts import Kind, Text, c_texts, markdown_texts, python_texts, without_code
from tools.words import ALLOWED, INSTEAD_OF_HEADLESS, PHRASES, Hit, examine, hits_in

UNUSUAL = {
    "told": "Returns what the client was told.",
    "asked": "Set once an operator has asked for the end.",
    "begun": "A choice that has begun.",
    "goes on": "A group goes on elsewhere.",
    "what was written": "The reader gets what was written.",
    "choice has written": "Output of a step that a choice has written.",
    "choices that are being written": "Number of choices that are being written.",
    "written tokens": "Number of written tokens to compute.",
    "drawn": "The logits from which a token is drawn.",
    "so many": "Yields at most so many blocks.",
    "the most": "`limit`: the most that a request can use.",
    "is no call": "The text is no call.",
    "behind": "Tokens behind a stop string.",
    "beside": "Labels beside the model.",
    "that of": "The weights of a step, and that of the next.",
    "of which": "A row of which top-p keeps 20,000 tokens.",
    "ours": "Tickets of ours.",
    "servers of others": "Tests for servers of others.",
    "nobody": "A read whose result nobody needs.",
    "room": "There is room for it.",
    "given back": "Tickets that were given back.",
    "none:": "Number of replicas; none: all of them.",
    "stands": "The tag stands before the text.",
    "as may be": "There are as many connections as may be.",
    "may be": "Closes the server. May be called twice.",
    "is whole": "The tag is whole.",
}

STANDARD = (
    "At least 1, at most 8.",
    "Asks the user for a name.",
    "The client may retry.",
    "Waits, so that the order is kept.",
    "There is no file; there are no choices.",
    "The process is no longer alive.",
    "A server behind a load balancer, or behind the gateway.",
    "What the worker leaves behind is deleted, nothing is left behind.",
    "Weights are written to disk, and a group is written into the log.",
    "Calls `told` and ``asked``, see https://example.com/told?asked=1.",
    "The whole file, as a whole.",
    "As many as there are.",
    "A value that is so long that it does not fit.",
    "Each of which is read once, regardless of which comes first.",
    "Goes on to the next one.",
    "It stands for a group.",
    "MUST NOT, SHOULD and MAY have the meaning of RFC 2119.",
)

PYTHON = '''"""Why it exists."""
# A comment
# of two lines
x = setting(1, "Number of choices, "
    f"at most {asked}.", pattern="a|b")
"""Set once."""
y = {"told": "no text", "asks": call("not for people")}
logger.warning("the file %s is gone", "name")
raise SizeError(f"it has {told} bytes", param="size") from None  # noqa: B904
parser.add_argument("--top", help="Show the largest.")
'''

HEADLESS = (
    *("Of a request's head.", "That of the request.", "Its workers.", "By model.", "Whether keys are needed."),
    *("How many blocks are free.", "Also the digest.", "As for a prompt.", "In tokens.", "True: the end is shown."),
    *("None: no limit.", "Empty: any.", "Most choices of one request.", "May be called twice."),
)

STANDS_ALONE = (
    *("Returns its workers.", "True if the end is shown.", "Number of free blocks, in tokens.", "In-place sort."),
    *("By default, nothing is kept.", "Empties the queue.", "None of the workers.", "Official client."),
)


def hits(text: str, *, kind: Kind = Kind.COMMENT) -> list[Hit]:
    return list(hits_in(Text(kind, 1, without_code(text))))


@pytest.mark.parametrize(("phrase", "text"), UNUSUAL.items(), ids=UNUSUAL)
def test_an_unusual_turn_of_phrase_is_found(phrase: str, text: str) -> None:
    assert [hit.phrase for hit in hits(text)] == [phrase]


@pytest.mark.parametrize("text", STANDARD)
def test_standard_english_is_accepted(text: str) -> None:
    assert hits(text) == []


@pytest.mark.parametrize("text", HEADLESS)
def test_a_docstring_without_a_head_is_found(text: str) -> None:
    assert hits(text, kind=Kind.DOCSTRING)[0].instead == INSTEAD_OF_HEADLESS


@pytest.mark.parametrize("text", STANDS_ALONE)
def test_a_docstring_with_a_head_is_accepted(text: str) -> None:
    assert hits(text, kind=Kind.DOCSTRING) == []


def test_a_hit_has_the_line_on_which_its_phrase_starts() -> None:
    assert [hit.line for hit in hits("one\ntwo told\nis\nno file asked")] == [2, 3, 4]


def test_texts_of_python_are_docstrings_comments_help_texts_and_messages() -> None:
    assert [(text.kind, text.line, text.words) for text in python_texts(PYTHON)] == [
        (Kind.DOCSTRING, 1, "Why it exists."),
        (Kind.COMMENT, 2, " A comment\n of two lines"),
        (Kind.HELP, 4, "Number of choices, \n    at most ``."),
        (Kind.DOCSTRING, 6, "Set once."),
        (Kind.MESSAGE, 8, "the file %s is gone"),
        (Kind.MESSAGE, 9, "it has `` bytes"),
        (Kind.HELP, 10, "Show the largest."),
    ]


def test_code_in_texts_is_left_out() -> None:
    (text,) = python_texts('"""Calls `told`.\n\n    >>> told()\n\nSee https://told.example/asked."""')
    assert text.words == "Calls ``.\n\n``\n\nSee ``"


def test_markdown_has_paragraphs_items_and_rows_without_blocks_of_code() -> None:
    found = list(markdown_texts("# Title\n\nTwo\nlines\n- an item\n- `code`\n\n```\ntold\n```\n| a | b |\n"))
    assert [(text.line, text.words) for text in found] == [
        (1, "# Title"),
        (3, "Two\nlines"),
        (5, "- an item"),
        (6, "- ``"),
        (11, "| a | b |"),
    ]


def test_cpp_has_comments() -> None:
    found = list(c_texts('int x;  // number of rows\n// one comment\n// on two lines\nchar* y = "// no comment";\n'))
    assert [(text.line, text.words.split()) for text in found] == [
        (1, ["number", "of", "rows"]),
        (2, ["one", "comment", "on", "two", "lines"]),
    ]


def test_the_share_counts_texts_with_at_least_one_hit(tmp_path: Path) -> None:
    file = tmp_path / "part.py"
    file.write_text('"""Was told, and asked."""\n# standard English\n# and more\n\nX = 1\n"""Number of rows."""\n')
    found = examine([file])
    assert (found.texts, found.with_hits, len(found.lines)) == (3, 1, 2)
    assert found.lines[0] == f"{file}:1: told -> use {PHRASES[0][1]}"


def test_an_allowed_phrase_of_a_file_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "part.py"
    file.write_text('"""Was told."""\n')
    entry = (str(file), "told")
    found = examine([file], allowed={entry: "a quotation"})
    assert found.with_hits == 0
    assert found.used == {entry}


def test_allowed_phrases_have_a_reason() -> None:
    assert all(ALLOWED.values())
