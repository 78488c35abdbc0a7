"""The glossary of docs/architecture.md: each word is defined once and used, and each avoided word is found."""

import re
from collections import Counter

import pytest

from tools.texts import Kind, Text
from tools.words import ROOT, hits_in

PAGE = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = PAGE.partition("## Glossary\n")[2].partition("\n## ")[0]
WORDS = [word for cell in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY, re.M) for word in cell.split(", ")]
DEFINED = [word for word in WORDS if word != "word" and not word.startswith("---")]
AVOIDED = re.findall(r"`(\w+)`", GLOSSARY.partition("Some words are not used")[2].partition("`tools/words.py`")[0])
SENTENCES = {
    "told": "The client is told the result.",
    "asked": "The worker is asked for a report.",
    "written": "The tokens written so far are kept.",
    "begun": "The choice has begun.",
    "wanted": "The wanted number of choices.",
    "ours": "This server is one of ours.",
    "books": "The scheduler keeps books about blocks.",
    "room": "There is room for one more group.",
    "whoever": "The error is sent to whoever waits.",
}
"""An avoided word, in a sentence with the meaning in which it is avoided."""


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """Returns the number of uses of each word in the source, in names and in texts."""
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    return Counter(word.lower() for word in re.findall(r"[A-Z]?[a-z]+", source))


def test_each_word_is_defined_once() -> None:
    assert len(DEFINED) > 25
    assert [word for word, count in Counter(DEFINED).items() if count > 1] == []


@pytest.mark.parametrize("word", DEFINED)
def test_each_word_is_used_in_the_source(word: str, counts: Counter[str]) -> None:
    """A word that nothing uses needs no definition."""
    assert all(counts[part] + counts[f"{part}s"] + counts[f"{part[:-1]}ies"] >= 10 for part in word.split())


def test_each_avoided_word_is_found_in_texts() -> None:
    assert [*SENTENCES] == AVOIDED
    found = {word: [*hits_in(Text(Kind.COMMENT, 1, sentence))] for word, sentence in SENTENCES.items()}
    assert [word for word, hits in found.items() if not hits] == []
