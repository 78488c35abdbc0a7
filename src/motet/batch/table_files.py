"""Parquet files and folders of Hugging Face datasets as input and output of a batch (`motet[batch]`).

The rows of an input are requests with the ids `row-0`, `row-1` and so on (`rows`). Results are written to a JSONL file,
as in any batch, so that a run can be interrupted. When all rows have a result or an error, the output table is
made: the columns of the input, in its order, with

    choices          texts of the choices
    finish_reasons   reason for the end of each choice
    response         complete body of the response, as JSON
    error            reason why the row has no response

A folder is read like `datasets.load_dataset` and `datasets.load_from_disk` do: all Parquet files, or the Arrow files
that `state.json` names. Memory is bounded: rows are read in batches, and each has the place of its result, 8 bytes."""

import importlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from motet.batch.line_file import MAX_RESULT_BYTES
from motet.batch.line_reader import read_lines
from motet.batch.requests import NumberedLine
from motet.batch.rows import PROMPT_COLUMNS, BodyFields, row_request
from motet.engines.refusals import error_message
from motet.errors import BatchStoppedError, ConfigError

PARQUET, ARROW = ".parquet", ".arrow"
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of a folder that `datasets.save_to_disk` has written: of a dataset, and of one with several splits."""
BATCH_ROWS = 256
ROW_ID = "row-"
ADDED = ("choices", "finish_reasons", "response", "error")
"""Columns of the output; columns of the input with these names are left out."""
OUTPUT_FILE = "train-00000-of-00001.parquet"
"""Name of the file in an output folder, which `datasets.load_dataset` reads as the split `train`."""


class _TableMessage(msgspec.Struct):
    content: Any = None


class _TableChoice(msgspec.Struct):
    text: str | None = None
    message: _TableMessage | None = None
    finish_reason: str | None = None


class _TableChoices(msgspec.Struct):
    choices: list[_TableChoice] = []


class _TableResponse(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _TableError(msgspec.Struct):
    message: str


class _TableResult(msgspec.Struct):
    custom_id: str | None
    response: _TableResponse | None
    error: _TableError | None


_RESULT, _CHOICES = msgspec.json.Decoder(_TableResult), msgspec.json.Decoder(_TableChoices)


def is_table(path: Path) -> bool:
    """Returns True if the path is a folder, or has the suffix of a table."""
    return path.suffix in (PARQUET, ARROW) or path.is_dir()


class TableInput:
    """A table whose rows are requests."""

    def __init__(self, path: Path, *, params: BodyFields) -> None:
        """Raises ConfigError if the path is not a table, if it has no column for prompts, or without pyarrow."""
        self._path = path
        self._params = params
        try:
            self.status = os.stat(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        self._files = files_of(path)
        try:
            self.columns: Sequence[str] = next(self.batches()).schema.names
        except StopIteration:
            raise ConfigError(f"{path} has no rows") from None
        self._prompts = [name for name in PROMPT_COLUMNS if name in self.columns]
        if not {"messages", "prompt", "body"} & set(self._prompts):
            raise ConfigError(f"{path} has no column messages, prompt or body; it has {', '.join(self.columns)}")

    def read(self) -> Iterator[NumberedLine]:
        number = 0
        for batch in self.batches(self._prompts):
            for row in batch.to_pylist():
                request = row_request(row, custom_id=f"{ROW_ID}{number}", params=self._params)
                number += 1
                yield NumberedLine(number, request)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yields the rows as `pyarrow.RecordBatch`, with these columns or all."""
        arrow, parquet = _pyarrow()
        for file in self._files:
            try:
                if file.suffix == ARROW:
                    with arrow.memory_map(str(file)) as source, arrow.ipc.open_stream(source) as reader:
                        for whole in reader:
                            for start in range(0, whole.num_rows, BATCH_ROWS):
                                batch = whole.slice(start, BATCH_ROWS)
                                yield batch.select(columns) if columns else batch
                else:
                    with parquet.ParquetFile(file) as source:
                        yield from source.iter_batches(BATCH_ROWS, columns=columns)
            except (arrow.ArrowException, OSError) as error:
                raise ConfigError(f"{file} cannot be read: {error}") from error


def files_of(path: Path) -> Sequence[Path]:
    """Returns the files of a table. Raises ConfigError."""
    if not path.is_dir():
        return [path]
    if (path / SPLITS).is_file():
        splits = json.loads((path / SPLITS).read_text())["splits"]
        raise ConfigError(f"{path} has the splits {', '.join(splits)}: name the folder of one of them")
    if (path / STATE).is_file():
        return [path / part["filename"] for part in json.loads((path / STATE).read_text())["_data_files"]]
    if files := sorted(path.rglob(f"*{PARQUET}")):
        return files
    raise ConfigError(f"{path} has no Parquet file, and no {STATE} of a dataset")


def write_table(table: TableInput, output: Path, *, results: Path, errors: Path, num_rows: int) -> None:
    """Makes the output table, in a file or an existing folder, from the lines of the results and of the errors. Raises
    BatchStoppedError if it cannot be written; `results` remains."""
    arrow, parquet = _pyarrow()
    target = output / OUTPUT_FILE if output.is_dir() else output
    unfinished = target.with_name(f".{target.name}.part")
    places = array("q", bytes(8 * num_rows))
    _add_places(places, results, sign=1)
    if errors.exists():
        _add_places(places, errors, sign=-1)
    try:
        with results.open("rb") as completed, (errors if errors.exists() else results).open("rb") as failed:
            writer, number = None, 0
            for batch in table.batches():
                lines = [_line_at(places, row, completed=completed, failed=failed) for row in
                         range(number, number + batch.num_rows)]  # fmt: skip
                number += batch.num_rows
                joined = _joined(batch, lines, arrow=arrow)
                writer = writer or parquet.ParquetWriter(unfinished, joined.schema)
                writer.write_batch(joined)
            if writer is not None:
                writer.close()
        unfinished.replace(target)
    except (arrow.ArrowException, OSError) as error:
        unfinished.unlink(missing_ok=True)
        raise BatchStoppedError(f"{target} cannot be written: {error}. {results} has all results.") from error


def _joined(batch: Any, lines: Sequence[_TableResult | None], *, arrow: Any) -> Any:
    """Returns a record batch with the columns of the output."""
    texts: list[list[str | None] | None] = []
    reasons: list[list[str | None] | None] = []
    for line in lines:
        choices = None if line is None or line.response is None else _choices_in(line.response)
        texts.append(None if choices is None else [_text_of(choice) for choice in choices])
        reasons.append(None if choices is None else [choice.finish_reason for choice in choices])
    bodies = [bytes(one.response.body).decode() if one and _is_success(one) and one.response else None for one in lines]
    kinds = (arrow.list_(arrow.string()), arrow.list_(arrow.string()), arrow.string(), arrow.string())
    values = (texts, reasons, bodies, [_reason(line) for line in lines])
    kept = [name for name in batch.schema.names if name not in ADDED]
    columns = [*(batch.column(name) for name in kept), *map(arrow.array, values, kinds)]
    return arrow.RecordBatch.from_arrays(columns, names=[*kept, *ADDED])


def _is_success(line: _TableResult) -> bool:
    return line.response is not None and line.response.status_code < 300


def _choices_in(response: _TableResponse) -> Sequence[_TableChoice] | None:
    if response.status_code >= 300:
        return None
    try:
        return _CHOICES.decode(response.body).choices
    except msgspec.DecodeError:  # a response of another form
        return None


def _text_of(choice: _TableChoice) -> str | None:
    if choice.text is not None:
        return choice.text
    content = choice.message.content if choice.message else None
    return content if content is None or isinstance(content, str) else json.dumps(content)


def _reason(line: _TableResult | None) -> str | None:
    if line is None:
        return "no result"
    if line.error is not None:
        return line.error.message
    return None if _is_success(line) or line.response is None else error_message(bytes(line.response.body))


def _add_places(places: "array[int]", path: Path, *, sign: int) -> None:
    """Stores the place of the line of each row: its offset plus 1, times `sign`. Rows without a line keep 0."""
    with path.open("rb", buffering=2**20) as file:
        for line in read_lines(file, max_bytes=MAX_RESULT_BYTES):
            custom_id = _RESULT.decode(line.text).custom_id if line.text and line.text.strip() else None
            digits = (custom_id or "").removeprefix(ROW_ID)
            if custom_id != digits and digits.isdecimal() and (row := int(digits)) < len(places):
                places[row] = sign * (line.start + 1)


def _line_at(places: "array[int]", row: int, *, completed: BinaryIO, failed: BinaryIO) -> _TableResult | None:
    if not (place := places[row]):
        return None
    file = completed if place > 0 else failed
    file.seek(abs(place) - 1)
    return _RESULT.decode(file.readline())


def _pyarrow() -> tuple[Any, Any]:
    """Imports pyarrow, which is an extra. Raises ConfigError without it."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("tables need pyarrow, which is not installed: pip install 'motet[batch]'") from error
