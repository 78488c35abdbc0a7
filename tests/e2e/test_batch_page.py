"""The blocks of docs/batch.md, in their order and in one folder."""

from pathlib import Path

import pytest

from tests.e2e.test_blocks import run_shell
from tools.blocks import ROOT, Kind, all_blocks


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("default_weights")
def test_the_commands_of_the_page_complete_a_file(tmp_path: Path) -> None:
    outputs = []
    for block in all_blocks([ROOT / "docs" / "batch.md"]):
        if block.kind is Kind.RUN_BY:
            (tmp_path / "block.py").write_text(block.text)
            outputs.append(run_shell("python block.py" if block.language == "python" else block.text, cwd=tmp_path))
    assert [outputs[-1].count(f"question-{number} [") for number in range(3)] == [1, 1, 1]
