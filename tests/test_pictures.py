"""The committed pictures are what their scripts make from the figures and the recorded run of today."""

import re
from xml.etree import ElementTree

import pytest

from tools.pictures.__main__ import FOLDER, PICTURES, outdated
from tools.pictures.kill import load
from tools.pictures.log_tables import entry, numbers

MAX_BYTES = 150_000


def test_the_committed_pictures_are_up_to_date() -> None:
    assert outdated() == [], "run python -m tools.pictures"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_needs_no_script_and_no_other_file(name: str) -> None:
    """Code hosts show an SVG as an image, in which neither scripts nor other files are loaded."""
    text = (FOLDER / f"{name}.svg").read_text()
    ElementTree.fromstring(text)
    assert len(text.encode()) < MAX_BYTES
    assert not re.search(r"<script|<image|<foreignObject|@import|url\(|href", text)
    assert "prefers-color-scheme: dark" in text


def test_the_recorded_run_has_eight_complete_choices_and_a_pause() -> None:
    run = load()
    texts = ["".join(delta.text for delta in run.deltas if delta.index == index) for index in range(run.n)]
    assert run.n == len(set(texts)) == 8
    assert run.first_s < run.lost_s <= run.killed_s < run.continued_s < run.end_s
    for index, text in enumerate(texts):
        assert " ".join(line.text for line in run.lines(index)) == text


def test_a_table_of_the_log_is_read_by_its_columns() -> None:
    rows = entry("Motet compared with vLLM, bf16, two cores").rows("n")
    assert [row["n"] for row in rows] == ["1", "8", "32"]
    assert numbers(rows[0]["total"]) == [0.94, 1.68]
    with pytest.raises(LookupError, match="no entry 'nothing'"):
        entry("nothing")
