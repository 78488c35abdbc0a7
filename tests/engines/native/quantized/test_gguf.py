"""GGUF files: the dequantization of the library, and the models that transformers loads from the same file."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedConfig

from motet.engines.native.model import load_model, read_config
from motet.engines.native.quantized import stored_tensors
from motet.engines.native.quantized.dequantized import DequantizedCheckpoint
from motet.errors import ModelLoadError, UnsupportedModelError
from motet.models.file_reading import FileReading
from motet.models.gguf_files.gguf_folder import gguf_folder
from motet.models.gguf_files.gguf_header import QUANTIZED
from motet.models.model_source import public_name, resolve
from tests.models.gguf_files import write_gguf
from tests.tiny_models import SIZES, config_of, save_model_of, save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

HEADS, KV_HEADS = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
METADATA: dict[str, int | float] = {
    "block_count": SIZES["num_hidden_layers"],
    "context_length": SIZES["max_position_embeddings"],
    "embedding_length": SIZES["hidden_size"],
    "feed_forward_length": SIZES["intermediate_size"],
    "vocab_size": SIZES["vocab_size"],
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": SIZES["head_dim"],
    "rope.dimension_count": SIZES["head_dim"],
    "rope.freq_base": 10000.0,
}


def arrays_of(source: Path, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the tensors of a model by their names in GGUF, as llama.cpp's conversion writes them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], SIZES["num_hidden_layers"])
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        array = tensor.float().numpy()
        found = names.get_name(name, try_suffixes=(".weight", ".bias")) or ""
        for part, heads in (("attn_q.", HEADS), ("attn_k.", KV_HEADS)):
            if architecture == "llama" and part in found:
                rows = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
                array = rows.swapaxes(1, 2).reshape(array.shape)
        arrays[found] = array + 1 if architecture.startswith("gemma") and "norm" in found else array
    return arrays


def tiny_config(architecture: str) -> PreTrainedConfig:
    config = config_of(architecture)
    config.tie_word_embeddings = architecture == "gemma2"  # which has no head of its own in GGUF
    return config


def gguf_model(source: Path, folder: Path, architecture: str, kinds: dict[str, str] | None = None) -> Path:
    """Writes a folder with a GGUF file and the config of `source`."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    write_gguf(folder / "model.gguf", architecture, arrays_of(source, architecture), kinds=kinds, metadata=METADATA)
    return folder


def load(folder: Path) -> dict[str, Tensor]:
    model = load_model(folder, read_config(folder), dtype=torch.float32, device=torch.device("cpu"))
    return dict(model.named_parameters())


@pytest.mark.parametrize("piece", [2**18, 100], ids=["at-once", "in-pieces"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32"])
def test_blocks_have_the_numbers_of_the_library(
    tmp_path: Path, kind: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "PIECE_NUMBERS", piece)
    number = gguf.GGMLQuantizationType[kind]
    generator = np.random.default_rng(0)
    blocks: np.ndarray[Any, Any] = generator.normal(size=(6, 512)).astype(np.float32)
    if kind.endswith("_K"):  # the library reads them, and only llama.cpp writes them
        _, weights, num_bytes = QUANTIZED[kind]
        blocks = generator.integers(256, size=(6, 512 // weights, num_bytes), dtype=np.uint8)
        places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
        for place in places:  # the scales are float16
            blocks[..., place : place + 2] = np.float16(0.01).reshape(1).view(np.uint8)
        blocks = blocks.reshape(6, -1)
    elif kind != "F32":
        blocks = gguf.quantize(blocks, number).view(np.uint8)
    write_gguf(tmp_path / "model.gguf", "qwen2", {"token_embd.weight": blocks}, kinds={"token_embd.weight": kind})
    (tmp_path / "config.json").write_text("{}")
    expected = gguf.dequantize(
        gguf.GGUFReader(tmp_path / "model.gguf").tensors[0].data, gguf.GGMLQuantizationType[kind]
    )
    checkpoint = DequantizedCheckpoint.open(tmp_path)
    assert checkpoint is not None
    found = checkpoint.tensors["model.embed_tokens.weight"].read(FileReading(), torch.float32)
    assert torch.equal(found, torch.from_numpy(expected.copy()).view(found.shape))
    assert len({*found.flatten().tolist()}) > 100


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_has_the_weights_from_which_its_file_was_made(tmp_path: Path, architecture: str) -> None:
    source = save_model_of(tiny_config(architecture), tmp_path / "source")
    found = load(gguf_model(source, tmp_path / "gguf", architecture))
    for name, tensor in load_file(source / "model.safetensors").items():
        # Norms of Gemma are rounded twice, when 1 is added and subtracted.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6 if "norm" in name else 0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_has_the_weights_that_transformers_reads(tmp_path: Path, architecture: str) -> None:
    source = save_model_of(tiny_config(architecture), tmp_path / "source")
    kinds = dict.fromkeys(
        (name for name in arrays_of(source, architecture) if "norm" not in name and "bias" not in name), "Q8_0"
    )
    folder = gguf_model(source, tmp_path / "gguf", architecture, kinds)
    reference = AutoModelForCausalLM.from_pretrained(
        folder,
        config=tiny_config(architecture),
        gguf_file="model.gguf",
        quantization_config=GgufConfig(gguf_file="model.gguf", dequantize=True),
        dtype=torch.float32,
    )
    found = load(folder)
    for name, tensor in reference.named_parameters():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
def test_a_file_alone_has_config_and_tokenizer(tmp_path: Path) -> None:
    """The tokenizer of the file has the tiny tokenizer's tokens, as far as a model of that size needs them."""
    architecture, file = "qwen3", tmp_path / "Tiny.gguf"
    source = save_tiny_model(architecture, tmp_path / "source")
    writer = gguf.GGUFWriter(file, architecture)
    tokenizer = json.loads((save_tiny_tokenizer(tmp_path / "source") / "tokenizer.json").read_bytes())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    vocabulary += [f"<unused{number}>" for number in range(len(vocabulary), SIZES["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * len(vocabulary))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]] or ["a b"])
    writer.add_eos_token_id(2)
    for key, value in METADATA.items():
        full = f"{architecture}.{key}"
        writer.add_float32(full, value) if isinstance(value, float) else writer.add_uint32(full, value)
    for name, array in arrays_of(source, architecture).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = resolve(str(file), cache=tmp_path / "cache")
    assert folder == gguf_folder(file, tmp_path / "cache") and public_name(str(file)) == str(file)
    assert (folder / "tokenizer.json").exists()
    found, expected = load(folder), load(source)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config, original = read_config(folder), read_config(source)
    for field in ("head_dim", "num_key_value_heads", "rope_parameters", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(config, field) == getattr(original, field), field


@pytest.mark.parametrize(
    ("architecture", "metadata", "tensor", "words"),
    [
        ("mamba", {}, "output_norm.weight", "general.architecture is 'mamba', and a config can be made for llama"),
        (
            "llama",
            {"rope.scaling.factor": 8.0},
            "output_norm.weight",
            r"llama.rope.scaling.factor is 8.0, which cannot be read",
        ),
        ("llama", {"expert_count": 8}, "output_norm.weight", "llama.expert_count is 8, which cannot be read"),
        ("llama", {}, "rope_freqs.weight", r"has RoPE factors \(rope_freqs.weight\), which cannot be read"),
    ],
)
def test_metadata_without_a_counterpart_in_a_config_is_refused(
    tmp_path: Path, architecture: str, metadata: dict[str, int | float], tensor: str, words: str
) -> None:
    """Without the factors of RoPE, for example, the answers to long prompts would be wrong."""
    write_gguf(tmp_path / "model.gguf", architecture, {tensor: np.ones(8)}, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=words):
        resolve(str(tmp_path / "model.gguf"), cache=tmp_path / "cache")


@pytest.mark.slow
def test_errors_name_the_tensor_and_the_file(tmp_path: Path) -> None:
    source = save_tiny_model("llama", tmp_path / "source")
    folder = gguf_model(source, tmp_path / "gguf", "llama")
    arrays = arrays_of(source, "llama")
    for name, array, words in (
        (
            "blk.0.ffn_up.weight",
            np.ones((3, 64)),
            r"tensor model.layers.0.mlp.up_proj.weight in .*model.gguf: its shape is",
        ),
        ("blk.0.novel.weight", np.ones(4), r"tensor blk.0.novel.weight in .*model.gguf: llama models do not have it"),
        (
            "output_norm.weight",
            np.full(64, np.nan),
            r"tensor model.norm.weight in .*model.gguf: it has numbers that are",
        ),
    ):
        write_gguf(folder / "model.gguf", "llama", arrays | {name: array}, metadata=METADATA)
        with pytest.raises(ModelLoadError, match=words):
            load(folder)
    (folder / "other.gguf").touch()
    with pytest.raises(ModelLoadError, match="has several GGUF files"):
        load(folder)


def test_rope_factors_need_the_rope_of_llama_3_in_the_config(tmp_path: Path) -> None:
    source = save_model_of(config_of("llama"), tmp_path / "source")
    folder = gguf_model(source, tmp_path / "gguf", "llama")
    arrays = arrays_of(source, "llama") | {"rope_freqs.weight": np.ones(16)}
    write_gguf(folder / "model.gguf", "llama", arrays, metadata=METADATA)
    with pytest.raises(
        UnsupportedModelError, match=r"RoPE factors \(rope_freqs.weight\), and its config.json does not"
    ):
        load(folder)
    config = json.loads((folder / "config.json").read_bytes())
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    config["rope_parameters"] |= {"rope_type": "llama3", **factors}
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)
