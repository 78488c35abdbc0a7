"""The GPU benchmark also runs on the CPU with a tiny model, and counts the work of a step."""

import json
from pathlib import Path

import pytest

from bench.gpu.__main__ import main
from bench.gpu.random_model import SHAPES


@pytest.mark.slow
def test_a_tiny_model_on_the_cpu_gives_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--shape", "tiny", "--device", "cpu", "--ns", "1,3", "--prompts", "40,70", "--steps", "3"]
    sizes = ["--copy-mib", "8", "--matrix", "128", "--kv-cache-gb", "0.02", "--max-num-batched-tokens", "64"]
    monkeypatch.setattr("sys.argv", ["bench.gpu", *small, *sizes, "--out", str(tmp_path / "out")])
    assert main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["prompt"], row["n"], row["attention"]) for row in report["rows"]] == [
        (prompt, n, attention) for attention in ("shared", "alone") for prompt in (40, 70) for n in (1, 3)
    ]
    assert all(row["step_ms"] > 0 and 0 < row["of_memory_rate"] < 1 for row in report["rows"])
    assert report["ceilings"]["bytes_per_s"] > 1e8
    assert {"device", "torch", "transformers", "command"} <= report["machine"].keys()
    assert json.loads((tmp_path / "out" / "gpu.json").read_text()) == report


@pytest.mark.slow
def test_cases_beyond_the_time_limit_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--shape", "tiny", "--device", "cpu", "--ns", "1", "--prompts", "20", "--steps", "1", "--minutes", "0"]
    monkeypatch.setattr("sys.argv", ["bench.gpu", *small, "--copy-mib", "1", "--matrix", "16", "--kv-cache-gb", "0.02"])
    assert main() == 0
    assert "2 of 2 cases were left out" in capsys.readouterr().out


def test_the_sizes_of_llama_3_8b_are_as_published() -> None:
    shape = SHAPES["llama-3-8b"]
    assert shape.block_weights + shape.hidden * shape.vocab == pytest.approx(8.03e9, rel=0.001)
    assert 2 * shape.kv_values == 128 * 1024, "128 KiB of KV a token in bf16"
    assert shape.operations(1, 0) == 2 * shape.block_weights
