"""Everything that pages name exists: files and tests of the repository; modules, classes, functions of the package."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "motet"
MAP = ROOT / "tests" / "README.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    MAP,
    *sorted((ROOT / "docs").glob("*.md")),
]
HISTORY = ROOT / "docs" / "log.md"
"""This page keeps the names of its time."""

FILE = re.compile(r"`((?:[\w-]+/)+[a-z0-9_.-]+\.(?:py|cpp|h|md|toml|ya?ml))`")
NAME = re.compile(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`")
TEST = re.compile(r"`(test_[a-z0-9_.]*[a-z0-9_](?:\.\.\.)?)`")
"""Name of a test. `...` is a part that the page leaves out."""


def is_file(name: str) -> bool:
    return any((folder / name).is_file() for folder in (ROOT, ROOT / "src", PACKAGE, PACKAGE / "engines" / "native"))


def is_there(name: str) -> bool:
    """Returns True if a dotted name below the package is a folder, a module, or a name that a module defines."""
    place, parts = PACKAGE, name.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if not parts:
        return True
    module = place / f"{parts[0]}.py"
    if module.is_file():
        parts.pop(0)
    else:
        module = place / "__init__.py"
    text = module.read_text()
    return all(re.search(rf"\b(?:class|def) {part}\b|^{part}\b", text, re.M) for part in parts)


@cache
def names_of_tests() -> str:
    """Returns the names of all tests, one per line."""
    files = (ROOT / "tests").rglob("test_*.py")
    return "\n".join(name for file in files for name in re.findall(r"def (test_\w+)", file.read_text()))


def is_test(name: str) -> bool:
    return re.search(rf"^{re.escape(name).replace(re.escape('...'), '.*')}$", names_of_tests(), re.M) is not None


def named(page: Path) -> Iterator[str]:
    text = page.read_text()
    yield from (name for name in FILE.findall(text) if not is_file(name))
    yield from (name for name in TEST.findall(text) if not name.endswith(".py") and not is_test(name))
    packages = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    for name in NAME.findall(text):
        if name.split(".")[0] in packages and not name.endswith((".py", ".md")) and not is_there(name):
            yield name


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY], ids=lambda page: page.name)
def test_everything_that_a_page_names_exists(page: Path) -> None:
    assert list(named(page)) == []


def worlds() -> Iterator[tuple[str, str]]:
    """Returns the names of the test worlds and the text of their files, from the rows of the map of the tests."""
    for row in re.findall(r"^\| (`.*?) \| (.*?) \|", MAP.read_text(), re.M):
        files = [(ROOT / name).read_text() for name in FILE.findall(row[1])]
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", row[0]):
            yield name, "\n".join(files)


def test_the_map_of_the_tests_names_what_its_files_define() -> None:
    missing = [name for name, text in worlds() if not re.search(rf"\b(?:class|def) {name}\b|^{name}\b", text, re.M)]
    assert missing == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert is_there("routing.groups.journey.Journey") and is_there("engines.native.step") and is_there("transfer.pull")
    assert not is_there("routing.nothing") and not is_there("routing.groups.journey.Nothing")
    assert is_file("docs/api.md") and not is_file("docs/nothing.md")
    assert is_test("test_a_name_that_..._is_found") and not is_test("test_a_name_that_..._is_lost")


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "examples").rglob("*.md"))], ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_code(page)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_has_a_line_for_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    linked = re.findall(r"^\| \[\w+\.md\]\((\w+\.md)\)", index, re.M)
    assert sorted(linked) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")
    assert linked[-1] == "log.md"


MIN_LETTERS = 14
"""A text of the source with fewer fixed letters is not a message."""
MIN_SHARE = 0.4
"""Share of a quoted line that must be fixed parts of messages. The rest are values."""


def messages_in(page: str) -> Iterator[re.Pattern[str]]:
    """Yields a pattern for each message of the source (a string, or a formatted string with any values in it) whose
    fixed parts are on the page. Its groups are the fixed parts."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                values = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [part.value if isinstance(part, ast.Constant) else None for part in values]
                fixed = [text.strip("\n") for text in texts if isinstance(text, str)]
                if max(map(len, fixed), default=0) >= MIN_LETTERS and all(text in page for text in fixed):
                    parts = (f"({re.escape(text.strip(chr(10)))})" if isinstance(text, str) else ".+" for text in texts)
                    yield re.compile("".join(parts))


def fixed_share(line: str, messages: list[re.Pattern[str]]) -> float:
    """Returns the share of a line that is fixed text of messages which match it."""
    fixed = set[int]()
    for found in filter(None, (message.search(line) for message in messages)):
        for group in range(1, (found.lastindex or 0) + 1):
            fixed.update(range(*found.span(group)))
    return len(fixed) / len(line)


@pytest.mark.slow
def test_messages_on_the_page_of_remedies_are_printed_by_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    blocks = re.findall(r"```text\n(.*?)```", page, re.S)
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith(" ")]
    messages = [*messages_in(page)]
    assert len(lines) > 10
    assert {line: share for line in lines if (share := fixed_share(line, messages)) < MIN_SHARE} == {}


def test_the_readme_has_at_most_900_words() -> None:
    text = re.sub(r"<[^>]+>|\]\([^)]+\)", " ", (ROOT / "README.md").read_text())  # without tags and addresses of links
    assert len(re.findall(r"[\w'./+-]*\w[\w'./+-]*", text)) <= 900
