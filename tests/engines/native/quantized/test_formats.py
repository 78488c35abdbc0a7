"""Dequantized weights have the bits of the libraries which define the formats, on files that these libraries made
(`make_files.py`), and the bits of transformers for the formats without such a library."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from motet.engines.native.quantized import stored_tensors
from motet.engines.native.quantized.dequantized import DequantizedCheckpoint
from motet.engines.native.quantized.detect import FORMATS
from motet.engines.native.quantized.fields import Fields
from motet.errors import ModelLoadError, UnsupportedModelError
from motet.models.file_reading import FileReading
from motet.models.safetensors_header import check_safetensors

FILES = sorted((Path(__file__).parent / "files").glob("*.safetensors"))
WEIGHT = "layer.weight"


def config_of(file: Path) -> dict[str, Any]:
    with safe_open(file, "pt") as opened:
        config: dict[str, Any] = json.loads(opened.metadata()["quantization_config"])
    return config


def checkpoint_of(file: Path, config: Mapping[str, Any]) -> DequantizedCheckpoint:
    form = FORMATS[config["quant_method"]](Fields(config, "quantization_config"))
    return DequantizedCheckpoint.of(form, {file: check_safetensors(file)})


def read(file: Path, config: Mapping[str, Any], name: str = WEIGHT, dtype: torch.dtype = torch.float32) -> Tensor:
    return checkpoint_of(file, config).tensors[name].read(FileReading(), dtype)


def write(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file(dict(tensors), folder / "made.safetensors")
    return folder / "made.safetensors"


@pytest.mark.parametrize(("piece", "tile"), [(2**18, 512), (700, 16)], ids=["at-once", "in-pieces"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_weights_have_the_bits_of_the_library(
    file: Path, piece: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "PIECE_NUMBERS", piece)
    monkeypatch.setattr(stored_tensors, "TILE_OUTPUTS", tile)
    expected = load_file(file)["expected"]
    for dtype in (expected.dtype, torch.float32, torch.bfloat16):
        assert torch.equal(read(file, config_of(file), dtype=dtype), expected.to(dtype))
    assert len({*expected.flatten().tolist()}) > 30


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_of_fp8_have_the_bits_of_transformers(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    weight = torch.randn(256, 128).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.01], [0.5]]).to(scale_dtype)
    file = write(tmp_path, {WEIGHT: weight, "layer.weight_scale_inv": scales})
    found = read(file, {"quant_method": "fp8", "weight_block_size": [128, 128]}, dtype=torch.bfloat16)
    dequantize: Any = Fp8Dequantize
    assert torch.equal(found, dequantize(None)._dequantize_one(weight, scales, torch.bfloat16))  # noqa: SLF001


def test_the_last_blocks_of_fp8_can_be_smaller(tmp_path: Path) -> None:
    """DeepSeek V3 has 576 rows in `kv_a_proj_with_mqa`, which are four and a half blocks."""
    weight, scales = torch.randn(160, 130).to(torch.float8_e4m3fn), torch.rand(2, 2)
    file = write(tmp_path, {WEIGHT: weight, "layer.weight_scale_inv": scales})
    expected = weight.float() * scales.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :130]
    assert torch.equal(read(file, {"quant_method": "fp8", "weight_block_size": [128, 128]}), expected)


def test_fp8_can_have_one_scale_per_tensor(tmp_path: Path) -> None:
    weight, scale = torch.randn(16, 8).to(torch.float8_e4m3fn), torch.tensor([0.3])
    file = write(tmp_path, {WEIGHT: weight, "layer.weight_scale": scale, "layer.input_scale": torch.ones(1)})
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    assert [*checkpoint_of(file, config).tensors] == [WEIGHT]
    assert torch.equal(read(file, config), weight.float() * 0.3)


@pytest.mark.parametrize("piece", [2**18, 100], ids=["at-once", "in-pieces"])
def test_experts_in_mxfp4_have_the_bits_of_transformers(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "PIECE_NUMBERS", piece)
    blocks = torch.randint(256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 2), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    file = write(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales})
    found = read(file, {"quant_method": "mxfp4"}, name, torch.bfloat16)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def group(**weights: object) -> dict[str, object]:
    return {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"} | weights}}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPTQ | {"bits": 3}, "bits is 3, which is not supported; it can be 4, 8"),
        (GPTQ | {"bits": True}, "bits is True"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"group_size": None}, "group_size is None"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"format": "bitblas"}, "format is 'bitblas'"),
        (GPTQ | {"format": "gptq", "checkpoint_format": "gptq_v2"}, "checkpoint_format is 'gptq_v2', .* as in format"),
        (GPTQ | {"dynamic": {"lm_head": {"bits": 8}}}, "dynamic is {'lm_head'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "bits is 8, which is not supported; it can be 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "format": "llm-awq"}, "format is 'llm-awq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        (COMPRESSED, "config_groups is None"),
        (COMPRESSED | group(num_bits=2), r"config_groups\.group_0\.weights: num_bits is 2"),
        (COMPRESSED | group(type="float"), "type is 'float'"),
        (COMPRESSED | group(strategy="token"), "strategy is 'token'"),
        (COMPRESSED | group(strategy="group"), "group_size is None"),
        (COMPRESSED | group() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format is 'sparse-24-bitmask'"),
        (COMPRESSED | group() | {"transform_config": {"config_groups": {"r": 1}}}, "config_groups is {'r'"),
    ],
)
def test_a_parameter_that_is_not_supported_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        FORMATS[config["quant_method"]](Fields(config, "config.json: quantization_config"))


def changed(name: str, change: Any) -> dict[str, Tensor]:
    """Returns the tensors of a GPTQ layer after a change."""
    tensors = load_file(next(file for file in FILES if file.stem == "gptq-4-32-gptq"))
    tensors.pop("expected")
    tensors[name] = change(tensors[name]).contiguous()
    return tensors


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "layer.scales",
            lambda t: t[:1],
            r"layer\.scales in .*made.safetensors: its shape is \[1, 32\], and should",
        ),
        ("layer.scales", lambda t: t.int(), r"layer\.scales in .*: its dtype is I32; BF16, F16, F32 can be used"),
        ("layer.qweight", lambda t: t.flatten(), "its shape is .*, and should have two dimensions"),
        ("layer.qweight", lambda t: t.float(), r"layer\.qweight in .*: its dtype is F32; I32 can be used"),
        ("layer.qzeros", lambda t: t[:, :1], r"layer\.qzeros in .*: its shape is \[2, 1\]"),
        ("layer.g_idx", lambda t: t + 1, r"layer\.g_idx in .*: it names a group that does not exist; there are 2"),
    ],
)
def test_a_broken_part_is_named_with_its_file(tmp_path: Path, name: str, change: Any, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read(write(tmp_path, changed(name, change)), GPTQ)


@pytest.mark.parametrize("missing", ["qweight", "qzeros", "scales"])
def test_a_missing_part_is_named(tmp_path: Path, missing: str) -> None:
    tensors = changed("layer.scales", lambda t: t)
    del tensors[f"layer.{missing}"]
    with pytest.raises(ModelLoadError, match=f"it is a part of a quantized weight, but layer.{missing} is missing"):
        read(write(tmp_path, tensors), GPTQ)


def test_the_version_of_zero_points_has_two_names() -> None:
    forms = [GPTQ | {name: "gptq_v2"} for name in ("format", "checkpoint_format")]
    assert (
        FORMATS["gptq"](Fields(forms[0], ""))
        == FORMATS["gptq"](Fields(forms[1], ""))
        != FORMATS["gptq"](Fields(GPTQ, ""))
    )


def test_without_group_indices_groups_are_consecutive(tmp_path: Path) -> None:
    tensors = changed("layer.scales", lambda t: t)
    del tensors["layer.g_idx"]
    file = next(file for file in FILES if file.stem == "gptq-4-32-gptq")
    assert torch.equal(read(write(tmp_path, tensors), GPTQ), load_file(file)["expected"].float())


def test_groups_of_compressed_tensors_can_be_in_order(tmp_path: Path) -> None:
    """LLM Compressor writes groups of -1 where the inputs were not reordered."""
    file = next(file for file in FILES if file.stem == "compressed-w4-32")
    tensors = load_file(file)
    expected = tensors.pop("expected")
    tensors["layer.weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)
    assert torch.equal(read(write(tmp_path, tensors), config_of(file)), expected.float())
    tensors["layer.weight_g_idx"][3] = 4
    with pytest.raises(ModelLoadError, match="it names a group that does not exist; there are 4"):
        read(write(tmp_path, tensors), config_of(file))


def test_the_stored_shape_of_packed_weights_must_be_theirs(tmp_path: Path) -> None:
    """The shape is a tensor of the file: an absurd one must not be allocated."""
    file = next(file for file in FILES if file.stem == "compressed-w4-32")
    tensors = load_file(file) | {"layer.weight_shape": torch.tensor([2**40, 2**20])}
    tensors.pop("expected")
    with pytest.raises(ModelLoadError, match=r"weight_shape in .*: it is \[1099511627776, 1048576\], and the packed"):
        read(write(tmp_path, tensors), config_of(file))
