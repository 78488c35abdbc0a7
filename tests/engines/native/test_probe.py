"""The parts that `motet doctor` finds in a process of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motet.engines.native.probe import model_facts, report, torch_facts, transport_facts
from motet.errors import ConfigError, KVMemoryError, UnsupportedModelError
from tests.engines.native.test_build import with_config
from tests.tiny_engine import engine_config

Tiny = Callable[[str], Path]


def test_torch_is_described() -> None:
    assert str(torch_facts()["version"]).startswith("2.")


def test_the_sizes_of_a_model_and_of_its_cache_need_no_weights(tiny: Tiny, tmp_path: Path) -> None:
    folder = with_config(tiny("llama"), tmp_path)
    (folder / "model.safetensors").write_bytes(b"12345")
    facts = model_facts(engine_config(folder, kv_cache_gb=0.01))
    assert (facts["architecture"], facts["dtype"], facts["device"]) == ("LlamaForCausalLM", "float32", "cpu")
    assert (facts["weights_bytes"], facts["max_model_len"]) == (5, 512)
    assert facts["kv_cache_bytes"] == pytest.approx(0.01 * 2**30, rel=0.01)


def test_what_keeps_an_engine_from_starting_is_an_error(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(KVMemoryError):
        model_facts(engine_config(tiny("llama"), kv_cache_gb=0.0001))
    with pytest.raises(UnsupportedModelError):
        model_facts(engine_config(with_config(tiny("llama"), tmp_path, architectures=["NovelForCausalLM"])))


def test_the_transport_that_a_cell_would_use_is_started_and_closed(tiny: Tiny) -> None:
    config = engine_config(tiny("llama"), kv_transfer_backend="shared-memory")
    assert transport_facts(config) == {"kind": "shared-memory"}


@pytest.mark.parametrize("error", [ConfigError("no"), RuntimeError("no")])
def test_a_part_that_fails_is_reported_with_its_error(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> dict[str, Any]:
        raise error

    report("torch", failing)
    report("model", dict)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == {"model": {}}
    assert lines[0]["torch"]["error"].endswith("no")
