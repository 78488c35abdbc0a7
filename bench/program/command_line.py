"""The command line that all benchmarks share: flags, lists of numbers, progress on standard error."""

import argparse
import sys
from collections.abc import Callable

from motet.models.smollm2 import DEFAULT_MODEL


def benchmark_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the docstring of the benchmark. `module` is what `python -m` runs."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def load_parser(
    module: str, doc: str | None, *, length: Callable[[str], object] = int, **defaults: object
) -> argparse.ArgumentParser:
    """Returns a parser with the flags of a benchmark that sends requests.

    `length` parses a number of tokens; `defaults` are the defaults of `ns`, `prompt_tokens`, `max_tokens` and
    `repeats`.
    """
    parser = benchmark_parser(module, doc)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model of the servers that the benchmark starts")
    parser.add_argument("--ns", type=numbers, help="values of n, the number of choices, e.g. 1,8,32")
    parser.add_argument("--prompt-tokens", type=length, help="number of tokens of a prompt")
    parser.add_argument("--max-tokens", type=length, help="number of tokens of a choice")
    parser.add_argument("--repeats", type=int, help="number of measurements of each case")
    add_check(parser)
    parser.set_defaults(**defaults)
    return parser


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="exit with code 1 if a floor is missed")


def numbers(text: str) -> tuple[int, ...]:
    """Parses `1,8,32`. An empty text gives an empty tuple."""
    return tuple(int(part) for part in text.split(",") if part)


def progress(line: str) -> None:
    """Prints a line on standard error, so that standard output has only the report."""
    print(line, file=sys.stderr, flush=True)
