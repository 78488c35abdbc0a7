"""docs/schemas.md agrees with the code."""

from motet.grammar.schema.formats import LLGUIDANCE, PATTERNS
from motet.text.tools.patterns import ALIASES
from tools.schemas_page import PAGE, page


def test_the_page_of_schemas_follows_from_the_code() -> None:
    assert PAGE.read_text() == page(), "run python tools/schemas_page.py"


def test_the_page_has_every_enforced_format() -> None:
    text = PAGE.read_text()
    assert [name for name in (*PATTERNS, *LLGUIDANCE, *ALIASES) if f"| `{name}` |" not in text] == []
