"""The files of `motet batch`, opened, locked and compared with each other before a server starts."""

import os
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from motet.batch.id_table import IdTable
from motet.batch.jsonl_input import JsonlInput
from motet.batch.output_file import OutputFile
from motet.batch.requests import InputSurvey, survey
from motet.batch.rows import BodyFields
from motet.batch.run import BatchProgress
from motet.batch.table_files import TableInput, is_table, write_table
from motet.errors import ConfigError
from motet.log import notice
from motet.models.progress_bars import terminal_progress

JSONL = ".jsonl"
NOTED_BYTES = 64 * 2**20
"""Minimum size of the files for a notice that they are read."""


@dataclass(frozen=True)
class BatchFiles:
    """The input, the output and the errors of one run."""

    lines: JsonlInput | TableInput
    output: OutputFile
    errors: OutputFile
    ids: IdTable
    """The ids of the results in the output file, and of the lines."""
    survey: InputSurvey
    table: Path | None
    """File or folder of the output table; None if the output is a JSONL file."""

    @classmethod
    def open(
        cls, input: Path, output: Path, *, errors: Path | None, params: BodyFields, stack: ExitStack
    ) -> "BatchFiles":
        """Opens the files until `stack` closes. `errors`: None for the default; `params`: fields of the bodies of lines
        without a body. Raises ConfigError if the files cannot be used together. Nothing is changed before everything is
        checked, except that the end of an interrupted output is repaired."""
        table = output if is_table(output) else None
        if table and not is_table(input):
            raise ConfigError(f"{output} is a table, which needs a table as input")
        lines = TableInput(input, params=params) if is_table(input) else JsonlInput(input, params=params)
        output = output.with_name(f"{output.stem}{JSONL}") if table else output
        errors = errors or errors_path(output)
        output_file = stack.enter_context(OutputFile(output))
        errors_file = stack.enter_context(OutputFile(errors, keep_empty=False))
        opened = [(input, lines.status), (output, output_file.status), (errors, errors_file.status)]
        if table and table.exists():
            opened.append((table, os.stat(table)))
        for number, (path, status) in enumerate(opened):
            for other, other_status in opened[:number]:
                if os.path.samestat(status, other_status):
                    raise ConfigError(f"{path} and {other} are the same file: input, output and errors must differ")
        ids = stack.enter_context(closing(IdTable()))
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
        return cls(lines, output_file, errors_file, ids, found, table)

    def finish(self, progress: BatchProgress) -> None:
        """Makes the output table, if there is one and no row is left. Raises BatchStoppedError."""
        if self.table is None or not isinstance(self.lines, TableInput):
            return
        if progress.num_left:
            notice(f"{self.output.path} has the results so far; {self.table} is made when all rows are complete")
            return
        paths = {"results": self.output.path, "errors": self.errors.path}
        write_table(self.lines, self.table, num_rows=progress.num_lines, **paths)


def errors_path(output: Path) -> Path:
    """Returns the default file of errors: `results.errors.jsonl` for `results.jsonl`."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")
