"""Scripts in the manner of vLLM's examples, and the Python of docs/python.md, run with the tiny model."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.blocks import ROOT, Kind, blocks_of

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
SMALL = {"MOTET_KV_CACHE_GB": "0.05", "MOTET_NUM_THREADS": "1", "MOTET_DTYPE": "float32"}


@pytest.fixture
def small_servers(module_forked: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    yield


@pytest.mark.parametrize("name", ["basic", "chat", "structured"])
def test_a_script_for_vllm_runs_with_another_import(
    name: str,
    folder: Path,
    small_servers: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(folder)])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_blocks_of_the_page_run_one_after_the_other(
    folder: Path, small_servers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    page, variables = ROOT / "docs" / "python.md", dict[str, object]()
    blocks = [block for block in blocks_of("docs/python.md", page.read_text()) if block.kind is Kind.RUN_BY]
    assert len(blocks) == 6
    for block in blocks:
        text = block.text.replace('"smollm2"', repr(str(folder)))
        exec(compile(text, block.place, "exec"), variables)
        assert capsys.readouterr().out, block.place
