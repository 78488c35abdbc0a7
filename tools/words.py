"""Finds discouraged phrases in docstrings, comments, messages and pages. Fails if too many texts have one.

`PHRASES` has the phrases, each with the words to use instead. A pattern matches only the unusual use of its words: "at
least 1", "so that", "behind a proxy", "there is no file" and "written to disk" are not found. Precision is more
important than recall. For comparison: in httpx, starlette, anyio and Ray Serve, well under 3 % of the texts have a hit.

Run: python -m tools.words [--max-share PERCENT] [PATHS...]     lists the hits in PATHS, by default in the project
     python -m tools.words --measure [PATHS...]                 prints for each path the share of texts with a hit
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.texts import FINDERS, Kind, Text, texts_of

ROOT = Path(__file__).resolve().parent.parent
MAX_LISTED = 100
"""Maximum number of hits that a check with `--max-share` lists."""
PLACES = ("src", "bench", "tools", "tests", "examples", "docs", "csrc", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")

# Parts of patterns: nouns that generate tokens; the words between such a noun and "written"; words after "written" that
# belong to files.
SOURCE = "(?:choices?|groups?|answers?|tokens?|models?|siblings|others|workers?|engines?|upstream|client)"
LINK = "(?:is|are|was|were|be|been|being|has|have|had|still|already|not|may|can|must|yet|that|which|it|they)"
WRITTEN = "(?:written|wrote)"
TO_A_FILE = r"(?! (?:to|into|in|as|by|out|from|on|down)\b)"
BEHIND_WHAT = (
    "(?:prox(?:y|ies)|gateways?|routers?|load balancers?|servers?|cell|ingress|firewall|flag|lock|scenes|property)"
)

# Patterns of phrases, in lower case with one space between words, each with the words to use instead. Only complete
# words match.
PHRASES: tuple[tuple[str, str], ...] = (
    # Requests and reports.
    ("told|tells", "reported, returned, sent, or the noun: chunk, event, usage"),
    ("asked|asks(?! the (?:user|operator|reader))", "requested, requests, sends a request to, queries"),
    ("wanted", "requested"),
    ("heard|hears", "received, knows of"),
    # Tokens.
    (f"what (?:was|were|is|are) (?:not )?{WRITTEN}", "the output tokens, the generated text"),
    (f"what (?:it|they|(?:an?|the) [a-z]+) (?:has |have |had )?{WRITTEN}", "its output tokens, what it sent"),
    (f"{SOURCE}(?: {LINK}){{0,4}} {WRITTEN}{TO_A_FILE}", "generated; of a client: sent"),
    (f"(?:it|they) (?:has|have|had) {WRITTEN}{TO_A_FILE}", "generated"),
    (f"{WRITTEN} (?:tokens?|part of|so far|nothing|something|anything|the choice|the same)", "generated, output"),
    ("(?:models?|choices?|groups?) (?:that )?writes?", "generates"),
    (r"drawn(?! (?:in|on|as|by|with|up|out|above|below|to)\b)", "sampled"),
    ("draws? (?:an?|the|its|their|each|one|every|no) (?:[a-z]+ )?tokens?", "samples"),
    # Start, end and order.
    ("begun|begins|began", "started, starts"),
    (
        r"(?:goes|go|went|gone) on(?! (?:to|with|the|an?|one|stdout|standard|ray|its|top|both|each|gpus?|cpus?)\b)",
        "continues",
    ),
    ("meanwhile", "during this time"),
    ("anew", "again"),
    ("not yet been", "not ... so far"),
    ("(?:makes?|made) ready", "prepares"),
    ("rising(?! (?:edge|again))", "ascending"),
    ("falling order", "descending"),
    ("in vain", "without success"),
    # Places and amounts.
    (
        r"(?<!left )(?<!leaves )(?<!nothing )(?<!lags )(?<!fall )(?<!falls )(?<!stays )(?<!step )(?<!steps )"
        rf"behind(?! (?:(?:[a-z]+ )?(?:[\w-]+ ){{0,1}}{BEHIND_WHAT}|haproxy|nginx|nat)\b)",
        "after, next to, at",
    ),
    ("besides?", "next to, in addition to, except"),
    (
        "(?<!saves )(?:the|least and) (?:most|least)(?= (?:that|this|it|which|of)\\b| ?[,.;:)]|$)",
        "the maximum, the minimum",
    ),
    (r"so (?:many|long|often|few)(?! as\b)(?!(?: [\w-]+){0,5} that\b)", "the number, duration or limit by its name"),
    ("as (?:there )?may be", "as allowed"),
    (
        "(?:is|are|be|been|was|were|sent|read|fed|taken|kept|stays?|comes?|arrives?|not|nor) whole(?! numbers?)",
        "complete, in one piece",
    ),
    (
        "(?<!the )(?<!a )whole (?:ones?|answers?|bod(?:y|ies)|responses?|messages?|texts?|schemas?|requests?|calls?)",
        "complete, entire",
    ),
    (r"(?<!as )(?:a|the) whole(?= ?[,.;:)]|$| of\b)|wholly", "the total, the entire ..., completely"),
    ("room(?! temperature)", "capacity, space, free blocks"),
    ("far (?:workers?|servers?|engines?|process(?:es)?|machines?|sides?|ends?|hosts?|peers?)", "remote"),
    # Whose it is, and who does it.
    ("nobody|whoever|somebody", "the actor: the client, the router, the engine process"),
    ("ours|theirs|of our own", "Motet's, or the owner's name"),
    ("[a-z]+s of others", "third-party, or the owner's name"),
    ("(?:that|those) of", "the noun again, or two sentences"),
    (
        "(?<!each )(?<!all )(?<!both )(?<!some )(?<!most )(?<!none )(?<!regardless )(?<!track )(?:of|by) which",
        "the noun again, or two sentences",
    ),
    ("(?:keeps?|kept|keeping|its|their|the|in|of|whose) books", "accounting, bookkeeping"),
    (
        r"(?:gives?|gave|given|giving) (?:(?:it|them|its|their|the|all|an?|one|[a-z]+s) ){0,2}back",
        "releases, frees, returns",
    ),
    (r"lets? (?:it |them |[a-z]+ )?go(?! (?:of|on)\b)", "releases"),
    (
        "(?:settles?|settling|drops?|gives? up) (?:an? |the |its |their |all )?(?:tickets?|leases?)",
        "releases, acknowledges",
    ),
    # Forms of a sentence.
    (
        "(?<!there )(?:is|are|was|were|be) no (?!longer|more|matter|different|doubt|guarantee|good|use|fewer|less"
        "|better|worse|older|newer|larger|smaller|higher|lower|later|earlier|slower|faster)[a-z]+",
        "is not a, has no",
    ),
    (r"(?<!as it )(?:stands?|stood)(?![ -](?:for|out|alone|by|up|still|in|ready)\b)", "is"),
    ("(?<=[.;:] )may (?:be|come|wait)", "can be"),
    ("(?<=[.;,] )(?:none|empty|true|false):", "None means ..., empty means ..."),
    # Pictures.
    ("strikes?|struck|blows?", "kills, faults"),
    ("plays? (?:an?|the|vllm|sglang|servers?|clients?)(?! (?:role|part|game|sound|note|video))", "fakes, simulates"),
)

# Starts of docstrings that are neither a verb nor a complete noun phrase.
HEADLESS = (
    "(?:that of|those of|of|its|ours|theirs|by(?! default)|whether|how (?:many|much|long|often|far)|also|as|in|may"
    r"|most|least)(?![\w-])|(?:true|false|none|empty|unset)[:;,]|(?:none|empty) (?:if|while|until|unless)\b"
)
INSTEAD_OF_HEADLESS = "a verb (Returns ...) or a noun phrase (Number of ...) at the start"

# Hits that are allowed: the file and the phrase as printed, with the reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("bench/compare/__main__.py", "ours"): "name of the flags --ours and --start-ours",
    ("bench/kernels/__main__.py", "ours"): "name of a way in --ways and of a column",
}

ANY_PHRASE = re.compile(r"\b(?:" + "|".join(f"({pattern})" for pattern, _ in PHRASES) + r")(?!\w)")
HEADLESS_START = re.compile(HEADLESS)


@dataclass(frozen=True)
class Hit:
    """One phrase in one text."""

    line: int
    phrase: str
    instead: str


def hits_in(text: Text) -> Iterator[Hit]:
    """Yields the discouraged phrases of a text."""
    words = " ".join(text.words.lower().split())
    if text.kind is Kind.DOCSTRING and (start := HEADLESS_START.match(words)):
        yield Hit(text.line, start[0], INSTEAD_OF_HEADLESS)
    for found in ANY_PHRASE.finditer(words):
        _, instead = PHRASES[(found.lastindex or 0) - 1]
        yield Hit(line_of_word(text, words.count(" ", 0, found.start())), found[0], instead)


def line_of_word(text: Text, number: int) -> int:
    """Returns the line of the file that has word `number` of a text, counted from 0."""
    for line, words in enumerate(text.words.split("\n"), start=text.line):
        number -= len(words.split())
        if number < 0:
            return line
    return text.line


@dataclass(frozen=True)
class Examined:
    """The result for some files: the number of texts and the hits."""

    texts: int
    with_hits: int
    lines: Sequence[str]
    """A line for each hit that is not allowed, as `path:line: phrase -> use ...`."""
    used: frozenset[tuple[str, str]]
    """Entries of `ALLOWED` that were needed."""

    @property
    def share(self) -> float:
        """Percentage of the texts with at least one hit that is not allowed."""
        return 100 * self.with_hits / self.texts if self.texts else 0.0


def examine(files: Iterable[Path], *, allowed: Mapping[tuple[str, str], str] = ALLOWED) -> Examined:
    """Returns the hits in all texts of these files."""
    texts = with_hits = 0
    lines: list[str] = []
    used: set[tuple[str, str]] = set()
    for path in files:
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for text in texts_of(path):
            texts += 1
            hits = list(hits_in(text))
            used.update((name, hit.phrase) for hit in hits if (name, hit.phrase) in allowed)
            hits = [hit for hit in hits if (name, hit.phrase) not in allowed]
            with_hits += bool(hits)
            lines += [f"{name}:{hit.line}: {hit.phrase} -> use {hit.instead}" for hit in hits]
    return Examined(texts, with_hits, lines, frozenset(used))


def files_in(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the files below these paths that `tools.texts` can read."""
    for path in paths:
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in below if file.suffix in FINDERS and file.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; by default all of the project")
    parser.add_argument("--max-share", type=float, default=0.0, help="percentage of texts that may have a hit")
    parser.add_argument("--measure", action="store_true", help="only print the share of each path")
    options = parser.parse_args()
    paths = [path.resolve() for path in options.paths] or [ROOT / place for place in PLACES]
    if options.measure:
        for path in paths:
            measured = examine(files_in([path]))
            print(f"{measured.share:5.1f} % of {measured.texts:5} texts  {path}")
        return 0
    found = examine(files_in(paths))
    stale = [] if options.paths else sorted(ALLOWED.keys() - found.used)
    for path, phrase in stale:
        print(f"tools/words.py: ALLOWED has {phrase!r} of {path}, which is not there: remove it", file=sys.stderr)
    too_many = found.share > options.max_share
    if too_many and options.max_share and len(found.lines) > MAX_LISTED:
        print(f"more than {options.max_share} %: `python -m tools.words PATHS` lists the phrases", file=sys.stderr)
    elif too_many:
        print(*found.lines, sep="\n", file=sys.stderr)
    share = f"{found.share:.1f} % with a phrase to replace ({len(found.lines)} phrases)"
    print(f"words: {found.texts} texts, {share}")
    return 1 if too_many or stale else 0


if __name__ == "__main__":
    sys.exit(main())
