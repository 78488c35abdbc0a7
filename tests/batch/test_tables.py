"""Tables as input and output of a batch, and lines with a prompt only."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from motet.batch.lines import BatchLine, LineError
from motet.batch.rows import row_request, short_line
from motet.batch.sender import ServerReply
from motet.errors import ConfigError
from tests.batch.batch_scene import BatchScene, ScriptedServer, refusal, request

pytestmark = pytest.mark.anyio
PARAMS = {"n": 2, "max_tokens": 5}
MESSAGES = [{"role": "user", "content": "Hi"}]


def body_of(row: dict[str, Any]) -> object:
    line = row_request(row, custom_id="a", params=PARAMS)
    return (line.url, json.loads(line.body)) if isinstance(line, BatchLine) else line.code


@pytest.mark.parametrize(
    ("row", "url", "body"),
    [
        ({"messages": MESSAGES}, "/v1/chat/completions", {**PARAMS, "messages": MESSAGES}),
        ({"prompt": MESSAGES}, "/v1/chat/completions", {**PARAMS, "messages": MESSAGES}),
        ({"prompt": "Hi", "answer": 4}, "/v1/completions", {**PARAMS, "prompt": "Hi"}),
        ({"prompt": [1, 2]}, "/v1/completions", {**PARAMS, "prompt": [1, 2]}),
        ({"url": "/v1/score", "body": {"n": 1, "prompt": None}}, "/v1/score", {"n": 1, "max_tokens": 5}),
        ({"body": '{"n": 3}', "messages": None}, "/v1/chat/completions", {"n": 3, "max_tokens": 5}),
        (
            {"messages": [{"role": "tool", "content": "1", "name": None}]},
            "/v1/chat/completions",
            {**PARAMS, "messages": [{"role": "tool", "content": "1"}]},
        ),
    ],
)
def test_a_row_is_a_request_with_the_common_fields(row: dict[str, Any], url: str, body: object) -> None:
    assert body_of(row) == (url, body)


@pytest.mark.parametrize("row", [{}, {"prompt": None}, {"body": "no JSON"}, {"body": 1}, {"prompt": object()}])
def test_a_row_without_a_prompt_is_an_error(row: dict[str, Any]) -> None:
    assert body_of(row) == "invalid_row"


def test_a_short_line_has_an_id_of_its_own_or_of_its_number() -> None:
    lines = [
        short_line(text, number=7, params={}) for text in (b'{"prompt": "Hi"}', b'{"custom_id": "x", "messages": []}')
    ]
    assert [line and line.custom_id for line in lines] == ["line-7", "x"]
    assert isinstance(short_line(b'{"custom_id": 1, "prompt": "Hi"}', number=7, params={}), LineError)
    for other in (b"[]", b'{"prompt": "Hi", "body": {}}', b"{}", b"\xff", b"[" * 10**5):
        assert short_line(other, number=7, params={}) is None


async def test_short_lines_and_complete_lines_can_be_mixed(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, request("a") + b'{"prompt": "Hi"}\n{"method": "POST", "prompt": "x"}\n', params=PARAMS)
    await scene.run()
    assert scene.results().keys() == {"a", "line-2"}
    assert scene.failures() == {None: "missing_required_parameter"}
    assert "or only messages or prompt" in scene.errors.read_text()


def answer(line: BatchLine, attempt: int) -> ServerReply:
    body = json.loads(line.body)
    if body["prompt"] == "no":
        return refusal(400)
    choices = [{"text": f"{body['prompt']} {i}", "finish_reason": "stop"} for i in range(body["n"])]
    return ServerReply(200, json.dumps({"choices": choices}).encode())


ROWS: dict[str, list[Any]] = {"prompt": ["a", "no", "b", None, "c"], "answer": [1, 2, 3, 4, 5], "choices": [0] * 5}


def write_folder(folder: Path) -> Path:
    """A dataset in two Parquet files, as on the hub."""
    (folder / "data").mkdir(parents=True)
    for number, rows in enumerate((slice(0, 3), slice(3, 5))):
        part = pyarrow.table({name: pyarrow.array(values[rows], None if name != "prompt" else pyarrow.string())
                              for name, values in ROWS.items()})  # fmt: skip
        pyarrow.parquet.write_table(part, folder / "data" / f"train-0000{number}.parquet")
    return folder


def write_saved(folder: Path) -> Path:
    """A dataset as `save_to_disk` writes it."""
    folder.mkdir()
    table = pyarrow.table(ROWS)
    with pyarrow.ipc.new_stream(str(folder / "data-00000.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000.arrow"}]}))
    return folder


def write_file(folder: Path) -> Path:
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table(ROWS), folder / "in.parquet")
    return folder / "in.parquet"


@pytest.mark.parametrize("write", [write_folder, write_saved, write_file])
@pytest.mark.parametrize("into_folder", [False, True])
async def test_a_table_gets_the_columns_of_the_answers(tmp_path: Path, write: Any, into_folder: bool) -> None:
    scene = BatchScene(tmp_path, b"", params=PARAMS)
    scene.input, scene.output = write(tmp_path / "input"), tmp_path / ("out" if into_folder else "out.parquet")
    if into_folder:
        scene.output.mkdir()
    for server in (ScriptedServer(answer), ScriptedServer(answer)):
        await scene.run(server)
        table = pyarrow.parquet.read_table(scene.output).to_pydict()
        assert list(table) == ["prompt", "answer", "choices", "finish_reasons", "response", "error"]
        assert (table["prompt"], table["answer"]) == (ROWS["prompt"], ROWS["answer"])
        assert table["choices"] == [["a 0", "a 1"], None, ["b 0", "b 1"], None, ["c 0", "c 1"]]
        assert table["finish_reasons"][0] == ["stop", "stop"]
        assert json.loads(table["response"][2])["choices"][1]["text"] == "b 1"
        assert [error is None for error in table["error"]] == [True, False, True, False, True]
    assert server.sent == ["row-1"]


async def test_a_table_that_is_not_complete_is_not_written(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, b"", params=PARAMS)
    scene.input, scene.output = write_file(tmp_path / "input"), tmp_path / "out.parquet"

    def stop(line: BatchLine, attempt: int) -> ServerReply:
        scene.stop()
        return answer(line, attempt)

    await scene.run(ScriptedServer(stop), concurrency=1)
    assert not scene.output.exists()
    await scene.run(ScriptedServer(answer))
    assert pyarrow.parquet.read_table(scene.output).num_rows == 5


def write_columns(path: Path, **columns: list[object]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_tables_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for name in ("text", "other", "empty"):
        (tmp_path / f"{name}.parquet").write_bytes(b"not a table")
    write_columns(tmp_path / "other.parquet", x=[1])
    write_columns(tmp_path / "empty.parquet", prompt=[])
    (tmp_path / "none").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    scene = BatchScene(tmp_path, b"")
    for name, message in (
        ("gone.parquet", "No such file"),
        ("text.parquet", "cannot be read"),
        ("other.parquet", "it has x"),
        ("empty.parquet", "has no rows"),
        ("none", "has no Parquet file"),
        ("splits", "train, test"),
    ):
        scene.input = tmp_path / name
        with pytest.raises(ConfigError, match=message):
            scene.open(ExitStack())
    scene.input, scene.output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    with pytest.raises(ConfigError, match="needs a table as input"):
        scene.open(ExitStack())
