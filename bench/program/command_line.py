"""The command line that all benchmarks share: flags, lists of numbers, progress on standard error."""

import argparse
import sys


def benchmark_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the docstring of the benchmark. `module` is what `python -m` runs."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="exit with code 1 if a target is missed")


def numbers(text: str) -> tuple[int, ...]:
    """Parses `1,8,32`. An empty text gives an empty tuple."""
    return tuple(int(part) for part in text.split(",") if part)


def progress(line: str) -> None:
    """Prints a line on standard error, so that standard output has only the report."""
    print(line, file=sys.stderr, flush=True)
