"""The comparison for mixtures of experts: all servers get the same requests, and the kernels run the model."""

import json
from pathlib import Path

import pytest

from bench.compare import experts
from motet.engines.native.build import build_parts
from tests.bench.conftest import talkative
from tests.engines.native.drive import gb_of
from tests.fake_server import FakeServer
from tests.tiny_engine import engine_config
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

SMALL = ["--ns", "1,3", "--prompt-tokens", "40", "--max-tokens", "4", "--repeats", "1", "--layers", "1"]


@pytest.mark.slow
@pytest.mark.kernels
def test_a_run_compares_two_servers_with_a_model_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_tiny_tokenizer(save_tiny_model("llama", tmp_path))
    kernels: list[str] = []

    def scripted(folder: str, *flags: str) -> FakeServer:
        if flags == ("--kernels", "compiled"):
            config = engine_config(Path(folder), dtype="bfloat16", kv_cache_gb=64 * gb_of(512))
            kernels.append(build_parts(config).info.kernels)
        return FakeServer(Path(folder), talkative)

    monkeypatch.setattr(experts, "motet_server", scripted)
    assert experts.main([*SMALL, "--experts", "4", "--model", str(tokenizer)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(kernels) == 1 and kernels != ["torch"]
    assert [(row["n"], row["compiled"]["tokens"], row["torch"]["tokens"]) for row in report["rows"]] == [
        (1, 4, 4),
        (3, 12, 12),
    ]
