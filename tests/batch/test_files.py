"""The output file of a batch after interruptions, and files that are not what the command line says."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from motet.batch.id_table import IdTable
from motet.batch.jsonl_input import JsonlInput
from motet.batch.lines import MAX_LINE_BYTES
from motet.batch.output_file import OutputFile
from motet.cli.batch.files import errors_path
from motet.errors import BatchStoppedError, ConfigError
from tests.batch.batch_scene import BatchScene, ScriptedServer, refusal, request, requests

pytestmark = pytest.mark.anyio


async def test_an_output_that_is_cut_anywhere_is_repaired(tmp_path: Path) -> None:
    """Every byte at which a killed process can have stopped writing; zeros after it are what a power failure leaves."""
    scene = BatchScene(tmp_path, requests(2))
    await scene.run()
    complete = scene.output.read_bytes()
    for cut in range(len(complete) + 1):
        for zeros in (b"", b"\0" * 9, b"\0\n\0")[: 1 if cut % 8 else 3]:
            scene.output.write_bytes(complete[:cut] + zeros)
            with OutputFile(scene.output) as output, closing(IdTable()) as table:
                output.add_finished(table)
                num_results = len(table)
            repaired = scene.output.read_bytes()
            assert repaired == complete[: complete.rfind(b"\n", 0, cut) + 1]
            assert num_results == repaired.count(b"\n")


async def test_a_run_after_a_cut_sends_only_what_is_missing(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(3))
    await scene.run()
    complete, expected = scene.output.read_bytes(), scene.results()
    for cut in range(0, len(complete), len(complete) // 10):
        scene.output.write_bytes(complete[:cut])
        server = await scene.run()
        assert scene.results() == expected
        assert len(server.sent) == 3 - complete[:cut].count(b"\n")


async def test_results_are_added_after_a_repair_and_not_in_place_of_it(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(3))
    await scene.run()
    complete = scene.output.read_bytes()
    scene.output.write_bytes(complete[:-5])
    await scene.run()
    assert scene.output.read_bytes() == complete


async def test_a_larger_input_continues_its_output(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(3))
    await scene.run()
    scene.input.write_bytes(requests(5))
    assert len((await scene.run()).sent) == 2
    scene.input.write_bytes(requests(2, start=4))
    assert (await scene.run()).sent == ["id-5"]
    assert len(scene.results()) == 6


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (requests(3, start=50), "none of an id of the input"),
        (requests(2) + request("id-2", "changed"), "results of other requests .* first is line 3"),
    ],
    ids=["other ids", "other requests"],
)
async def test_the_output_of_another_input_is_refused(tmp_path: Path, lines: bytes, message: str) -> None:
    scene = BatchScene(tmp_path, requests(3))
    await scene.run()
    before = scene.output.read_bytes()
    scene.input.write_bytes(lines)
    with pytest.raises(ConfigError, match=message):
        await scene.run()
    assert scene.output.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [b"my notes", b"my notes\n", b"\0\1\2", b'{"id": 1}\n', request("a"), b"\x1f\x8b\0\n\0", b"[" * 100_000],
    ids=lambda content: repr(content[:9]),
)
async def test_other_files_are_not_changed(tmp_path: Path, content: bytes) -> None:
    scene = BatchScene(tmp_path, requests(1))
    for path in (scene.output, scene.errors):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is not the (output|errors) of a batch"):
            await scene.run()
        assert path.read_bytes() == content
        path.unlink()


async def test_a_result_after_a_broken_line_is_refused(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(3))
    await scene.run()
    lines = scene.output.read_bytes().splitlines(keepends=True)
    scene.output.write_bytes(lines[0] + b"\0\0\n" + lines[1])
    with pytest.raises(ConfigError, match="line 3"):
        await scene.run()


async def test_the_errors_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(1))
    await scene.run(ScriptedServer(lambda line, n: refusal(400)))
    await scene.run(ScriptedServer(lambda line, n: refusal(404)))
    assert scene.failures() == {"id-0": 404}
    scene.errors.write_bytes(scene.errors.read_bytes()[:-9])
    await scene.run()
    assert scene.failures() == {}


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out"), pytest.raises(ConfigError, match="in use"):
        OutputFile(tmp_path / "out")
    OutputFile(tmp_path / "out").__exit__()


async def test_input_output_and_errors_must_be_different_regular_files(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(1))
    os.link(scene.input, scene.output)
    with pytest.raises(ConfigError, match="same file"):
        await scene.run()
    assert scene.input.read_bytes() == requests(1)
    for make in (os.mkfifo, os.mkdir):
        scene.output.unlink()
        make(scene.output)
        with pytest.raises(ConfigError, match=r"not a regular file|needs a table"):
            await scene.run()
        os.rmdir(scene.output) if scene.output.is_dir() else scene.output.unlink()
        scene.output.touch()
    scene.input.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        await scene.run()


def test_an_input_that_is_gone_before_its_end_is_named(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(3))
    lines = JsonlInput(scene.input, params={})
    scene.input.unlink()
    with pytest.raises(BatchStoppedError, match=r"in\.jsonl cannot be read: No such file"):
        list(lines.read())


async def test_an_output_can_be_a_symbolic_link(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(2))
    (tmp_path / "disk").mkdir()
    scene.output.symlink_to(tmp_path / "disk" / "results")
    await scene.run()
    assert scene.output.is_symlink()
    assert len((tmp_path / "disk" / "results").read_bytes().splitlines()) == 2


class FullDisk:
    """Writes until the disk is full: the last write is a part of its bytes."""

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes

    def __call__(self, descriptor: int, data: memoryview) -> int:
        if not self._free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(descriptor, data[: self._free_bytes])
        self._free_bytes -= written
        return written


@pytest.mark.parametrize("free_bytes", [0, 1, 10, 15, 20, 29])
def test_a_full_disk_leaves_only_complete_lines(tmp_path: Path, free_bytes: int) -> None:
    path = tmp_path / "out"
    with OutputFile(path, write=FullDisk(free_bytes)) as file, pytest.raises(BatchStoppedError, match="No space left"):
        for _ in range(3):
            file.append(b"123456789\n")
    assert path.read_bytes() == b"123456789\n" * (free_bytes // 10)


def test_errors_are_next_to_the_output() -> None:
    assert errors_path(Path("a/out.jsonl")) == Path("a/out.errors.jsonl")
    assert errors_path(Path("out")) == Path("out.errors.jsonl")


@pytest.mark.slow
async def test_a_line_that_is_too_long_is_skipped_with_little_memory(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, b"")
    with scene.input.open("wb") as file:
        file.write(request("a"))
        file.truncate(2 * MAX_LINE_BYTES)  # zeros, which take no space on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + request("b"))
    await scene.run()
    assert scene.results().keys() == {"a", "b"}
    assert scene.failures() == {None: "line_too_long"}
