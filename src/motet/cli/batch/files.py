"""The files of `motet batch`, opened, locked and compared with each other before a server starts."""

import os
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from motet.batch.id_table import IdTable
from motet.batch.jsonl_input import JsonlInput
from motet.batch.line_file import LineFile
from motet.batch.requests import BatchInput, InputSurvey, survey
from motet.cli.progress import terminal_progress
from motet.errors import ConfigError
from motet.log import notice

NOTED_BYTES = 64 * 2**20
"""Size of the files from which on a notice says that they are read."""


@dataclass(frozen=True)
class BatchFiles:
    lines: BatchInput
    output: LineFile
    errors: LineFile
    ids: IdTable
    """The ids of the results in the output file, and of the lines."""
    survey: InputSurvey

    @classmethod
    def open(cls, input: Path, output: Path, *, errors: Path, stack: ExitStack) -> "BatchFiles":
        """Opens the files until `stack` closes. Raises ConfigError if they cannot be used together. Nothing is changed
        before everything is checked, except that the end of an interrupted output is repaired."""
        lines = JsonlInput(input)
        output_file = stack.enter_context(LineFile(output))
        errors_file = stack.enter_context(LineFile(errors, keep_empty=False))
        opened = [(input, lines.status), (output, output_file.status), (errors, errors_file.status)]
        for number, (path, status) in enumerate(opened):
            for other, other_status in opened[:number]:
                if os.path.samestat(status, other_status):
                    raise ConfigError(f"{path} and {other} are the same file: input, output and errors must differ")
        ids = IdTable()
        takes_long = lines.status.st_size + output_file.num_bytes > NOTED_BYTES
        with terminal_progress(notice).stage(f"reading {input}") if takes_long else nullcontext():
            if removed := output_file.add_finished(ids):
                notice(f"{output}: removed {removed} bytes of an incomplete line at its end")
            found = survey(lines, ids, output=str(output))
        errors_file.start_again()
        if found.num_finished:
            notice(f"{output} has {found.num_finished:,} of {found.num_lines:,} results: continuing")
        if found.num_foreign:
            notice(f"{output} also has {found.num_foreign:,} results whose ids are not in {input}")
        return cls(lines, output_file, errors_file, ids, found)


def errors_path(output: Path) -> Path:
    """Returns the default file of errors: `results.errors.jsonl` for `results.jsonl`."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")
