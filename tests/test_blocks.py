"""Every block of commands on a page has a mark, and the commands of blocks that are only parsed have valid flags."""

import argparse
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motet.cli.main import app
from tools.blocks import ROOT, Block, Kind, all_blocks, blocks_of

PARSED = [
    pytest.param(block, id=block.place, marks=[pytest.mark.slow] if "python -m" in block.text else [])
    for block in all_blocks()
    if block.kind is Kind.PARSED
]
PROGRAMS = ("motet", "python")
"""Programs whose flags are known here. The other commands of a parsed block are not checked."""


class Parsed(Exception):
    """Raised when a program has accepted its arguments, before it does anything."""


def test_every_block_has_a_language_and_a_mark() -> None:
    assert [f"{block.place} {problem}" for block in all_blocks() for problem in block.problems()] == []


@pytest.mark.filterwarnings(
    "ignore:.*found in sys.modules:RuntimeWarning"
)  # runpy, if another test has imported the module
@pytest.mark.parametrize("block", PARSED)
def test_the_commands_of_a_parsed_block_have_valid_flags(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = [command for command in block.commands() if parses(shlex.split(command), monkeypatch)]
    assert parsed, "a block without such commands has the mark `not run`"


def parses(command: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns True if the command has valid arguments, and False if its program is not known. Fails otherwise."""
    program, *arguments = command
    arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
    if program == "motet":
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0, result.output
    elif Path(program).name == "python" and arguments[0] == "-m":
        parse_as_module(arguments[1], arguments[2:], monkeypatch)
    else:
        return False
    return True


def parse_as_module(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a module up to the end of its `parse_args`, which ends the process if an argument is invalid."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(*given: object) -> argparse.Namespace:
        parse_args(*given)  # type: ignore[call-overload]
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Parsed):
            runpy.run_module(name, run_name="__main__")


def test_marks_are_read_and_their_mistakes_are_found() -> None:
    page = (
        "<!-- run: server -->\n```python\na = 1\n```\n\n"
        "- item\n\n  <!-- not run: needs a GPU -->\n  ```sh\n  make \\\n    gpu   # comment\n  ```\n\n"
        "```sh\nmake\n```\n```\nmake\n```\n<!-- run: moon -->\n```sh\n```\n<!-- run by nothing.py -->\n```sh\n```\n"
    )
    blocks = list(blocks_of("page.md", page))
    assert [(block.line, block.kind, block.detail) for block in blocks[:3]] == [
        (2, Kind.RUN, "server"),
        (9, Kind.NOT_RUN, "needs a GPU"),
        (14, Kind.UNMARKED, ""),
    ]
    assert blocks[1].commands() == ["make gpu"]
    problems = [next(block.problems(), None) for block in blocks]
    assert problems[:2] == [None, None]
    for problem, words in zip(
        problems[2:], ("no mark", "no language", "unknown world: moon", "nothing.py"), strict=True
    ):
        assert problem is not None and words in problem
    assert (ROOT / "README.md").is_file()
