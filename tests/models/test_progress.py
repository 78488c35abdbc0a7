"""Stages are reported as lines, and downloads by the size of their files."""

import threading
from pathlib import Path

from motet.models.progress import Lines, folder_bytes, size_text, watched


def test_a_long_download_is_reported_from_time_to_time() -> None:
    lines: list[str] = []
    times_s = iter((0.0, 1.0, 10.0, 11.0, 20.0))
    with Lines(lines.append, clock=lambda: next(times_s)).stage("downloading m", 4 * 10**9) as report:
        for done_bytes in (10**8, 10**9, 2 * 10**9, 3 * 10**9):
            report(done_bytes)
    assert lines == [
        "downloading m (4.00 GB)",
        "downloading m: 1.00 GB of 4.00 GB",
        "downloading m: 3.00 GB of 4.00 GB",
    ]


def test_the_size_of_a_download_is_the_size_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(bytes(100_000))
    before, grown = folder_bytes(tmp_path), threading.Event()
    sizes: list[int] = []

    def report(num_bytes: int) -> None:
        sizes.append(num_bytes)
        if num_bytes:
            grown.set()

    with watched(tmp_path, report, less_bytes=before):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "part").write_bytes(b"x" * 50_000)
        assert grown.wait(10)
    assert sizes[-1] == folder_bytes(tmp_path) - before


def test_sizes_have_a_unit() -> None:
    assert [size_text(n) for n in (0, 2000, 6_635_520, 92_871_040, 1_240_000_000)] == [
        "0 kB",
        "2 kB",
        "6.6 MB",
        "93 MB",
        "1.24 GB",
    ]
