"""Engines with quantized checkpoints: the answers of transformers with the dequantized weights, updates and errors."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from motet.engines.native.build import build_parts
from motet.engines.native.model import load_model, read_config, weights_in_memory
from motet.errors import ModelLoadError, RequestError, UnsupportedModelError
from motet.models.checkpoint import CheckpointKind
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.engines.native.quantized.tiny_quantized import METHODS, quantize
from tests.tiny_engine import engine_config
from tests.tiny_models import SIZES, Reference, assert_greedy_equal, assert_lively, save_model_of, save_tiny_model

CPU = torch.device("cpu")
FILE = "model.safetensors"
Folders = tuple[Path, Path]
"""A quantized checkpoint, and the same model with dequantized weights."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    """Returns a function from a method to its folders."""
    source = save_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    folders: dict[str, Folders] = {}

    def make(method: str) -> Folders:
        if method not in folders:
            folders[method] = quantize(source, tmp_path_factory.mktemp(method), method)
        return folders[method]

    return make


def load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_model(folder, read_config(folder), dtype=dtype, device=CPU)


def changed(
    source: Path,
    folder: Path,
    *,
    config: Mapping[str, object] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes a checkpoint with other fields of `quantization_config`, and with more tensors."""
    content = json.loads((source / "config.json").read_bytes())
    content["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(load_file(source / FILE) | dict(tensors or {}), folder / FILE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_model_has_the_dequantized_weights(
    made: Callable[[str], Folders], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = made(method)
    with caplog.at_level(logging.INFO):
        found = load(quantized).state_dict()
    expected = load(plain).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert " in the files, " in caplog.text and " in float32 in memory" in caplog.text
    config = read_config(quantized)
    assert weights_in_memory(quantized, config, dtype=torch.bfloat16) == sum(t.nbytes for t in expected.values()) // 2


@pytest.mark.slow
def test_experts_are_dequantized_one_by_one_and_merged(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    quantized, plain = quantize(save_model_of(config, tmp_path / "source"), tmp_path, "fp8")
    found, expected = load(quantized).state_dict(), load(plain).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_experts_of_gpt_oss_are_dequantized(tmp_path: Path) -> None:
    windows: dict[str, Any] = {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    config = GptOssConfig(**SIZES, **windows, num_local_experts=4, num_experts_per_tok=2)
    source, stored, expected = save_model_of(config, tmp_path), {}, {}
    for name, tensor in load_file(source / FILE).items():
        if not name.endswith("_proj"):
            stored[name] = expected[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 124, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales).float()
    save_file(stored, source / FILE)
    content = json.loads((source / "config.json").read_bytes())
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(content))
    found = load(source).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(stored) == len(expected) + 6
    prompt, reference = prompt_of(50), Reference(source)  # transformers dequantizes it too
    tokens = run(make_core(source), [group("g", prompt, temperature=0.0, max_tokens=40)])["g"].tokens[0]
    assert_greedy_equal(reference, prompt, tokens, reference.greedy(prompt, 40))


@pytest.mark.slow
def test_a_quantized_model_answers_as_transformers_with_the_dequantized_weights(
    made: Callable[[str], Folders],
) -> None:
    quantized, plain = made("gptq")
    core = make_core(quantized)
    prompt, reference = prompt_of(50), Reference(plain)
    expected = reference.greedy(prompt, 60)
    found = run(core, [group("g", prompt, temperature=0.0, max_tokens=60)])["g"].tokens[0]
    assert_lively(expected, 30)
    assert_greedy_equal(reference, prompt, found, expected)


@pytest.mark.kernels
@pytest.mark.slow
def test_int8_is_made_from_the_dequantized_weights(made: Callable[[str], Folders]) -> None:
    answers = []
    for folder in made("awq"):
        core = make_core(folder, dtype="bfloat16", quantization="int8")
        answers.append(run(core, [group("g", prompt_of(50), max_tokens=40)])["g"].tokens)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_weights_are_updated_from_a_checkpoint_in_any_format(made: Callable[[str], Folders], tmp_path: Path) -> None:
    other = quantize(save_tiny_model("llama", tmp_path / "source", seed=5), tmp_path, "compressed-tensors")
    parts = build_parts(engine_config(made("gptq")[0]))
    start = parts.weights.checksums()
    sums = []
    for folder in other:
        loaded = parts.weights.prepare(CheckpointKind.FILES, [folder])
        assert loaded.prepared.complete
        loaded.staged.apply()
        sums.append(parts.weights.checksums())
    assert sums[0] == sums[1] != start
    parts.weights.prepare(CheckpointKind.START).staged.apply()
    assert parts.weights.checksums() == start


@pytest.mark.slow
def test_an_update_that_cannot_be_dequantized_is_refused_by_name(
    made: Callable[[str], Folders], tmp_path: Path
) -> None:
    parts = build_parts(engine_config(made("gptq")[1]))
    bad = changed(made("gptq")[0], tmp_path, config={"bits": 3})
    with pytest.raises(RequestError, match="bits is 3, which is not supported") as refused:
        parts.weights.prepare(CheckpointKind.FILES, [bad])
    assert refused.value.code == "invalid_weights"
    with pytest.raises(RequestError, match=r"g_idx: the model has no such tensor \(model.safetensors\)"):
        parts.weights.prepare(CheckpointKind.FILES, [made("gptq")[0] / FILE])


def test_a_format_is_refused_before_weights_are_read(made: Callable[[str], Folders], tmp_path: Path) -> None:
    folder = changed(made("gptq")[0], tmp_path, config={"quant_method": "bitsandbytes"})
    (folder / FILE).write_bytes(b"not weights")
    with pytest.raises(UnsupportedModelError, match="quantization_config: quant_method is 'bitsandbytes'"):
        build_parts(engine_config(folder))


@pytest.mark.slow
def test_zero_points_are_a_part_of_the_digest(made: Callable[[str], Folders], tmp_path: Path) -> None:
    """The same file has other weights if its zero points are stored in another way."""
    folder = changed(made("gptq")[0], tmp_path, config={"checkpoint_format": "gptq_v2"})
    digests = {build_parts(engine_config(each)).info.model_digest for each in (made("gptq")[0], folder)}
    assert len(digests) == 2


@pytest.mark.slow
def test_biases_of_zeros_are_left_out_and_others_refused(made: Callable[[str], Folders], tmp_path: Path) -> None:
    """AutoGPTQ writes a bias for every linear layer, also for models without biases."""
    name = "model.layers.0.self_attn.o_proj.bias"
    load(changed(made("gptq")[0], tmp_path, tensors={name: torch.zeros(64)}))
    folder = changed(made("gptq")[0], tmp_path, tensors={name: torch.ones(64)})
    with pytest.raises(ModelLoadError, match=f"{name} in .*{FILE}: llama models with this config do not have it"):
        load(folder)


def test_layers_with_transposed_weights_are_refused(tmp_path: Path) -> None:
    """GPT-2 stores its weights transposed. A square weight would be loaded without an error."""
    config = GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96)
    folder = quantize(save_model_of(config, tmp_path / "source"), tmp_path, "gptq")[0]
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel, whose layers store transposed weights"):
        load(folder)
