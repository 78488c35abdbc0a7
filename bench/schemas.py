"""Runs folders of JSON schemas with instances, and counts what is accepted, refused and wrong.

Reads each file below the folders in one of three formats:

    JSONSchemaBench             a schema
    its maskbench               {"schema": ..., "tests": [{"data": ..., "valid": true}, ...]}
    JSON-Schema-Test-Suite      [{"schema": ..., "tests": [{"data": ..., "valid": true}, ...]}, ...]

Each schema is compiled as a server would compile it; with `--no-trial`, heavy ones without a trial in a process of
their own, which takes half a second each. Each instance is then fed to a matcher token by token, as
`json.dumps` writes it. Prints tables of refusals by reason, times and wrong instances, and JSON on the last line.

Times are CPU times.

    valid, not accepted     Objects are closed unless `--open` is given, and their properties have the order of the
                            schema. So some valid instances are never generated
    invalid, accepted       an answer could violate its schema
    unanswerable            schemas that were accepted, and whose valid instance ends with an error of the matcher

Run: python -m bench.schemas FOLDER [FOLDER ...] [--model MODEL] [--open] [--every K] [--processes P] [--no-trial]
    [--list WHAT]
"""

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.program.command_line import benchmark_parser, progress
from bench.program.report import LEFT, machine, print_report, table
from motet.errors import GrammarError
from motet.grammar.compiled_grammar import Grammars, Matcher, fill_masks, mask_words
from motet.grammar.limits import is_heavy
from motet.grammar.schema.client_schema import closed_source
from motet.grammar.trial import compile_in_process
from motet.models.model_source import resolve_tokenizer
from motet.settings.server_config import cache_folder, environment
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar, GrammarKind

MAX_LISTED = 40
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|/.*/|-?\d[\d.e+-]*")
"""Parts of an error that differ between schemas with the same fault."""
LISTS = ("refused", "valid_refused", "invalid_accepted", "unanswerable", "slowest")
NUM_SLOWEST = 8


@dataclass(frozen=True)
class Case:
    """A schema with its instances."""

    name: str
    schema: object
    valid: Sequence[object] = ()
    invalid: Sequence[object] = ()


@dataclass
class Outcome:
    """What happened to a schema and its instances."""

    name: str
    refused: str | None = None
    """The error; None if the schema was accepted."""
    heavy: bool = False
    compile_ms: float = 0.0
    """CPU time to compile it, without the trial of a heavy one."""
    slowest_mask_ms: float = 0.0
    valid: int = 0
    invalid: int = 0
    valid_refused: int = 0
    invalid_accepted: int = 0
    unanswerable: str | None = None
    """The error of the matcher while a valid instance was fed."""
    wrong: list[str] = field(default_factory=list)
    """The instances that were refused or accepted wrongly."""


class SchemaRunner:
    """Compiles schemas for one tokenizer, and feeds instances to their matchers."""

    def __init__(self, folder: Path, *, closes: bool, tries: bool = True) -> None:
        """`tries`: compile heavy schemas in a process of their own first."""
        self._tokenizer = Tokenizer.load(folder)
        self._closes = closes
        self._tries = tries
        tokens = self._tokenizer.special_tokens
        eos = self._tokenizer.named_tokens.get("eos_token", "")
        self._eos = (tokens[eos],) if eos in tokens else ()
        self._grammars = Grammars(
            lambda: self._tokenizer, vocab_size=self._tokenizer.vocab_size, eos_token_ids=self._eos, max_cached_mb=0
        )
        self._mask = np.zeros((1, mask_words(self._tokenizer.vocab_size)), np.int32)
        self._grammars.get(Grammar(GrammarKind.REGEX, "a"))  # builds the vocabulary

    def run(self, case: Case) -> Outcome:
        outcome = Outcome(case.name, valid=len(case.valid), invalid=len(case.invalid))
        source = json.dumps(case.schema, ensure_ascii=False)
        grammar = Grammar(GrammarKind.JSON, closed_source(source) if self._closes else source)
        outcome.heavy = is_heavy(grammar)
        try:
            if outcome.heavy and self._tries:
                compile_in_process(
                    grammar, self._tokenizer, vocab_size=self._tokenizer.vocab_size, eos_token_ids=self._eos
                )
            start_s = time.process_time()
            compiled = self._grammars.get(grammar)
            outcome.compile_ms = (time.process_time() - start_s) * 1e3
        except GrammarError as error:
            outcome.refused = error.message
            return outcome
        for instance in case.valid:
            if not self._accepts(instance, compiled.matcher(), outcome):
                outcome.valid_refused += 1
                outcome.wrong.append(json.dumps(instance)[:200])
        errors = outcome.unanswerable
        for instance in case.invalid:
            if self._accepts(instance, compiled.matcher(), outcome):
                outcome.invalid_accepted += 1
                outcome.wrong.append(json.dumps(instance)[:200])
        outcome.unanswerable = errors
        return outcome

    def _accepts(self, instance: object, matcher: Matcher, outcome: Outcome) -> bool:
        text = json.dumps(instance, ensure_ascii=False)
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            errors = fill_masks([matcher], self._mask)
            outcome.slowest_mask_ms = max(outcome.slowest_mask_ms, matcher.mask_cpu_s * 1e3)
            if errors:
                outcome.unanswerable = errors[0].message
                return False
            if not self._mask[0, token // 32] >> (token % 32) & 1:
                return False
            matcher.consume(token)
        return bool(matcher.inner.is_accepting())


def read_cases(folders: Iterable[Path], *, every: int = 1) -> Iterator[Case]:
    """Yields the cases of all JSON files below the folders, or of every k-th file. Raises `ValueError` with the name of
    a file that cannot be read, and if a folder has no files."""
    for folder in folders:
        if not folder.is_file() and not any(folder.rglob("*.json")):
            raise ValueError(f"{folder}: there are no files *.json")
    files = sorted(file for folder in folders for file in ([folder] if folder.is_file() else folder.rglob("*.json")))
    for file in files[::every]:
        try:
            yield from _cases_of(file)
        except (ValueError, KeyError, TypeError, AssertionError) as exc:
            raise ValueError(f"{file}: not a file in one of the three formats: {exc!r}") from exc


def _cases_of(file: Path) -> list[Case]:
    content = json.loads(file.read_text())
    if isinstance(content, list):
        return [_with_tests(f"{file}: {each['description']}", each) for each in content]
    if isinstance(content, dict) and "tests" in content and "schema" in content:
        return [_with_tests(str(file), content)]
    return [Case(str(file), content)]


def _with_tests(name: str, content: dict[str, object]) -> Case:
    tests = content["tests"]
    assert isinstance(tests, list)
    valid, invalid = ([test["data"] for test in tests if bool(test["valid"]) is wanted] for wanted in (True, False))
    return Case(name, content["schema"], valid, invalid)


_runner: SchemaRunner | None = None
"""The runner of this process."""


def _start(folder: Path, closes: bool, *, tries: bool) -> None:
    global _runner
    _runner = SchemaRunner(folder, closes=closes, tries=tries)


def _run(case: Case) -> Outcome:
    assert _runner is not None
    return _runner.run(case)


def run_all(cases: Sequence[Case], *, folder: Path, closes: bool, tries: bool, processes: int) -> list[Outcome]:
    outcomes = []
    start = partial(_start, folder, closes, tries=tries)
    with ProcessPoolExecutor(processes, initializer=start) as pool:
        for outcome in pool.map(_run, cases, chunksize=16):
            outcomes.append(outcome)
            if len(outcomes) % 500 == 0:
                progress(f"{len(outcomes)} of {len(cases)} schemas")
    return outcomes


def reason(error: str) -> str:
    """Returns an error without its place and without the values that it quotes."""
    return QUOTED.sub("…", re.sub(r"^at .*?: ", "", error))[:110]


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    accepted = [each for each in outcomes if each.refused is None]
    times = sorted(each.compile_ms for each in accepted) or [0.0]
    with_valid = [each for each in accepted if each.valid]
    return {
        "schemas": len(outcomes),
        "accepted": len(accepted),
        "accepted_percent": 100 * len(accepted) / max(1, len(outcomes)),
        "heavy": sum(each.heavy for each in accepted),
        "compile_ms_median": times[len(times) // 2],
        "compile_ms_p99": times[int(len(times) * 0.99)],
        "compile_ms_max": times[-1],
        "slowest_mask_ms": max((each.slowest_mask_ms for each in accepted), default=0.0),
        "valid": sum(each.valid for each in accepted),
        "valid_not_accepted": sum(each.valid_refused for each in accepted),
        "invalid": sum(each.invalid for each in accepted),
        "invalid_accepted": sum(each.invalid_accepted for each in accepted),
        "schemas_with_a_valid_instance": len(with_valid),
        "schemas_with_no_valid_instance_accepted": sum(each.valid_refused == each.valid for each in with_valid),
        "schemas_unanswerable": sum(each.unanswerable is not None for each in accepted),
    }


def listed(outcomes: Sequence[Outcome], what: str) -> list[str]:
    """Returns a line for each outcome of a kind, with its error or its instances; or the schemas whose instances needed
    the slowest masks."""
    if what == "slowest":
        slowest = sorted(outcomes, key=lambda each: -each.slowest_mask_ms)[:NUM_SLOWEST]
        return [f"{each.name}\n    {each.slowest_mask_ms:.2f} ms" for each in slowest]
    found = [each for each in outcomes if getattr(each, what)]
    return [f"{each.name}\n    {each.refused or each.unanswerable or each.wrong}" for each in found[:MAX_LISTED]]


def main() -> None:
    parser = benchmark_parser("bench.schemas", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders with JSON files, or files")
    parser.add_argument("--model", default="smollm2", help="model whose tokenizer is used")
    parser.add_argument("--open", action="store_true", help="leave objects open, as the standard does")
    parser.add_argument("--every", type=int, default=1, help="read every K-th file only")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-trial", action="store_true", help="compile heavy schemas without a trial")
    parser.add_argument("--list", choices=LISTS, action="append", default=[], help="print the cases of this kind")
    args = parser.parse_args()
    try:
        cases = list(read_cases(args.folders, every=args.every))
    except ValueError as exc:
        parser.error(str(exc))
    folder = resolve_tokenizer(args.model, cache=cache_folder(environment()))
    outcomes = run_all(cases, folder=folder, closes=not args.open, tries=not args.no_trial, processes=args.processes)
    reasons = Counter(reason(each.refused) for each in outcomes if each.refused)
    for what in args.list:
        print(f"{what}:", *listed(outcomes, what), sep="\n", file=sys.stderr)
    figures = summary(outcomes)
    print_report(
        {**figures, "refused": dict(reasons)},
        table([("refused", count, ""), ("reason", why, LEFT)] for why, count in reasons.most_common()),
        table([("figure", name, LEFT), ("value", value, ".4g")] for name, value in figures.items()),
        conditions=machine(),
    )


if __name__ == "__main__":
    main()
