"""Building an engine: errors for invalid models and settings, the number of KV blocks, and the warning of an engine
that other hosts can reach without a cluster key."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from motet.engines.native.build import build_parts
from motet.engines.native.kv.cache_size import kv_cache_gb_for, num_blocks_for
from motet.engines.native.kv.pool import blocks_for
from motet.engines.native.model import read_config, read_shape
from motet.errors import ConfigError, KVMemoryError, ModelLoadError, UnsupportedModelError
from motet.transfer.ticket import is_loopback
from motet.types import Role
from tests.engines.native.drive import build_core
from tests.property_settings import examples
from tests.tiny_engine import engine_config
from tests.tiny_models import save_tiny_model

Tiny = Callable[[str], Path]


def test_a_fraction_of_gpu_memory_has_no_effect_on_a_cpu(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(tiny("llama"))
    given = replace(config, gpu_memory_utilization=0.9)
    assert build_core(given).info.num_blocks == build_core(config).info.num_blocks
    assert "--gpu-memory-utilization has no effect: the device is cpu" in caplog.text


def with_config(source: Path, folder: Path, **changes: object) -> Path:
    """Writes a folder with the changed config of `source` and no weights."""
    config = json.loads((source / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("changes", [{"num_attention_heads": 7}, {"hidden_size": "wide"}, {"vocab_size": None}])
def test_impossible_sizes_are_an_invalid_config(tiny: Tiny, tmp_path: Path, changes: dict[str, object]) -> None:
    folder = with_config(tiny("llama"), tmp_path, **changes)
    with pytest.raises(ModelLoadError, match="cannot read the model config"):
        build_parts(engine_config(folder))


@pytest.mark.parametrize(
    ("file", "changes", "why"),
    [
        ("config.json", {"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be a number from 1 on"),
        ("config.json", {"head_dim": -8}, "config.json: head_dim is -8, and must be a number from 1 on"),
        ("config.json", {"architectures": 5}, "cannot read the model config"),
        ("config.json", {"rope_parameters": "x"}, "cannot read the model config"),
        ("config.json", {"dtype": "int64"}, "the model config has the dtype torch.int64; set --dtype to"),
        ("config.json", {"hidden_act": 5}, "cannot"),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": "x"}, "generation_config.json: eos_token_id is 'x', and must be"),
        ("generation_config.json", {"eos_token_id": [1, [2]]}, "eos_token_id is [1, [2]], and must be a token id or"),
    ],
)
def test_a_broken_value_is_an_error_of_one_line(
    tiny: Tiny, tmp_path: Path, file: str, changes: dict[str, object], why: str
) -> None:
    """The bug: the engine process ended with a traceback."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    content = json.loads((folder / file).read_bytes())
    (folder / file).write_text(json.dumps(content | changes))
    with pytest.raises(ModelLoadError) as caught:
        build_parts(engine_config(folder, dtype="auto"))
    assert why in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("model", "other", "ends"),
    [(None, None, (2,)), ([2, 7], None, (2, 7)), ([2, 7], {"eos_token_id": 9}, (9,)), ([2, 7], {}, (2,))],
    ids=["config", "generation config", "another folder", "another folder without end tokens"],
)
def test_end_tokens_are_those_of_the_generation_config_even_if_its_defaults_are_not_used(
    tiny: Tiny, tmp_path: Path, model: list[int] | None, other: dict[str, object] | None, ends: tuple[int, ...]
) -> None:
    folder = with_config(tiny("llama"), tmp_path)
    if model is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": model}))
    generation = tmp_path / "other" if other is not None else folder
    if other is not None:
        generation.mkdir()
        (generation / "generation_config.json").write_text(json.dumps(other))
    assert read_shape(folder, read_config(folder), generation=generation).eos_token_ids == ends


def test_an_unknown_architecture_is_refused_with_its_name(tiny: Tiny, tmp_path: Path) -> None:
    folder = with_config(tiny("llama"), tmp_path, model_type="novel", architectures=["NovelForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="NovelForCausalLM, which is not a decoder of transformers"):
        build_parts(engine_config(folder))


def test_the_error_for_a_cache_larger_than_the_machine_names_the_flag(tiny: Tiny) -> None:
    with pytest.raises(KVMemoryError, match="--kv-cache-gb"):
        build_parts(engine_config(tiny("llama"), kv_cache_gb=1e6))


def test_the_error_for_a_cache_of_one_block_suggests_no_length() -> None:
    with pytest.raises(KVMemoryError, match=r"hold 1 blocks, .*: raise --kv-cache-gb$"):
        num_blocks_for(1.0, 1 << 30, max_model_len=64, block_size=8)


def test_an_unknown_rope_type_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        build_parts(engine_config(with_config(tiny("llama"), tmp_path, rope_parameters=rope)))


def test_a_file_without_weights_is_a_broken_model(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a safetensors file"):
        build_parts(engine_config(folder))


def test_a_missing_weight_is_an_error(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="lack 1 tensors"):
        build_parts(engine_config(folder))


MB = 2**20


def test_memory_is_counted_in_complete_blocks() -> None:
    assert num_blocks_for(1.0, MB, max_model_len=100, block_size=16) == 1024
    assert num_blocks_for(0.5, MB, max_model_len=100, block_size=16) == 512
    assert num_blocks_for(1.0, 3 * MB, max_model_len=100, block_size=16) == 341


def test_one_block_more_than_the_longest_sequence_is_enough_and_one_less_is_not() -> None:
    # 100 tokens in blocks of 16 need 7 blocks, and one more because prompt and tail are rounded up separately.
    assert num_blocks_for(8 / 1024, MB, max_model_len=100, block_size=16) == 8
    with pytest.raises(KVMemoryError):
        num_blocks_for(7 / 1024, MB, max_model_len=100, block_size=16)


def test_the_error_says_which_length_would_fit_and_that_length_fits() -> None:
    with pytest.raises(KVMemoryError, match=r"hold 7 blocks.*needs 8.*--max-model-len to 96 or less"):
        num_blocks_for(7 / 1024, MB, max_model_len=100, block_size=16)
    assert num_blocks_for(7 / 1024, MB, max_model_len=96, block_size=16) == 7


def test_the_error_for_no_memory_says_that_there_are_0_blocks() -> None:
    with pytest.raises(KVMemoryError, match="hold 0 blocks"):
        num_blocks_for(0.0, MB, max_model_len=100, block_size=16)


def test_the_kv_cache_gets_the_part_of_a_gpu_that_the_weights_leave() -> None:
    total = 80 * 2**30
    assert kv_cache_gb_for(0.9, total_bytes=total, free_bytes=total - 16 * 2**30) == pytest.approx(72 - 16)
    assert kv_cache_gb_for(1.0, total_bytes=total, free_bytes=total) == 80


def test_the_error_for_a_full_gpu_says_how_much_is_in_use() -> None:
    with pytest.raises(KVMemoryError, match=r"0\.9 of 80\.0 GiB leaves no memory .* 75\.0 GiB are in use"):
        kv_cache_gb_for(0.9, total_bytes=80 * 2**30, free_bytes=5 * 2**30)


@examples(200)
@given(st.integers(1, 200), st.integers(0, 200), st.sampled_from([8, 16, 32]))
def test_every_split_of_the_longest_sequence_into_prompt_and_tail_fits(prompt: int, tail: int, block_size: int) -> None:
    needed = blocks_for(prompt + tail, block_size) + 1
    assert blocks_for(prompt, block_size) + max(1, blocks_for(tail, block_size)) <= needed


ELSEWHERE = "203.0.113.9"
"""An address that RFC 5737 reserves for documentation, so that no machine has it."""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_are_recognised(host: str) -> None:
    assert is_loopback(host)
    assert not is_loopback(ELSEWHERE)


@pytest.mark.parametrize(("cluster_key", "warnings"), [("", 1), ("secret", 0)])
def test_a_worker_that_others_can_reach_without_a_cluster_key_logs_a_warning(
    cluster_key: str, warnings: int, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(
        tiny("llama"), role=Role.DECODE, side_channel_host=ELSEWHERE, side_channel_port=0, cluster_key=cluster_key
    )
    with caplog.at_level(logging.WARNING, logger="motet"), pytest.raises(ConfigError, match="no interface"):
        build_core(config)
    assert [record.message.startswith("--cluster-key is not set") for record in caplog.records] == [True] * warnings
