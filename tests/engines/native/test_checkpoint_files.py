"""A checkpoint whose files do not have the weights of its config is refused with the names of the file and the tensor,
before the engine serves. Single and sharded files, and tied and separate heads, can be loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from motet.engines.native.build import build_parts
from motet.engines.native.model import load_model, read_config
from motet.errors import ModelLoadError, UnsupportedModelError
from motet.models import convert
from motet.models.folder import INDEX, WEIGHTS
from tests.tiny_engine import engine_config
from tests.tiny_models import SIZES, save_model_of, save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

NORM, HEAD, DOWN = "model.norm.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama in several files."""
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("single"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder / "sharded", max_shard_size="150KB")
    return folder / "sharded"


def load(folder: Path) -> torch.nn.Module:
    return load_model(folder, read_config(folder), dtype=torch.float32, device=torch.device("cpu"))


def file_of(folder: Path, tensor: str) -> Path:
    return folder / str(json.loads((folder / INDEX).read_bytes())["weight_map"][tensor])


def change(tensor: str, by: Callable[[Tensor], Tensor]) -> Callable[[Path], object]:
    """Returns a function that changes a tensor in a folder."""

    def in_folder(folder: Path) -> None:
        file = file_of(folder, tensor)
        save_file(load_file(file) | {tensor: by(load_file(file)[tensor]).contiguous()}, file, metadata={"format": "pt"})

    return in_folder


def add(tensor: str, *, beside: str, numbers: Tensor) -> Callable[[Path], object]:
    def in_folder(folder: Path) -> None:
        file = file_of(folder, beside)
        save_file(load_file(file) | {tensor: numbers}, file, metadata={"format": "pt"})

    return in_folder


def remove(tensor: str) -> Callable[[Path], object]:
    """Returns a function that removes a tensor from its file and from the index."""

    def in_folder(folder: Path) -> None:
        file = file_of(folder, tensor)
        save_file({name: each for name, each in load_file(file).items() if name != tensor}, file)
        index = json.loads((folder / INDEX).read_bytes())
        del index["weight_map"][tensor]
        (folder / INDEX).write_text(json.dumps(index))

    return in_folder


def configure(**fields: object) -> Callable[[Path], object]:
    def in_folder(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return in_folder


def truncate(folder: Path) -> None:
    file = file_of(folder, DOWN)
    file.write_bytes(file.read_bytes()[:-100])


def exchange(folder: Path) -> None:
    one, other = file_of(folder, NORM), file_of(folder, DOWN)
    assert one != other
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (truncate, r"model-.*\.safetensors has \d+ bytes, but its header states"),
        (exchange, r"model-.*\.safetensors has no tensor .*, which .*index\.json names; it is in model-"),
        (lambda folder: file_of(folder, NORM).unlink(), r"model-.*\.safetensors is missing"),
        (remove(NORM), "lack 1 tensors of the model, such as model.norm.weight"),
        (
            change(NORM, lambda t: t[:32]),
            rf"tensor {NORM} in .*model-.*: its shape is \[32\], and the model's is \[64\]",
        ),
        (change(DOWN, lambda t: t.T), r"tensor .*down_proj\.weight in .*model-.*: its shape is \[128, 64\], and the"),
        (
            change(DOWN, lambda t: t.int()),
            r"tensor .*down_proj\.weight in .*: its dtype is I32, but .*; without it, BF16, F16, F32",
        ),
        (
            change(DOWN, lambda t: t.to(torch.float8_e4m3fn)),
            r"down_proj\.weight in .*: its dtype is F8_E4M3, but .*config\.json has no quantization_config",
        ),
        (change(DOWN, lambda t: t / 0), r"tensor .*down_proj\.weight in .*model-.*: it has numbers that are NaN"),
        (add("lm_head.bias", beside=HEAD, numbers=torch.ones(320)), r"tensor lm_head\.bias in .*: llama models with"),
        (add("extra.weight", beside=HEAD, numbers=torch.ones(2)), r"tensor extra\.weight in .*model-.*: llama models"),
        (add(NORM, beside=DOWN, numbers=torch.ones(64)), rf"tensor {NORM} in .*: it is also in model-"),
        (configure(num_hidden_layers=2), r"tensor model\.layers\.2\..* in .*: llama models with this config do not"),
        (
            configure(vocab_size=2**30),
            r"embed_tokens\.weight in .*: its shape is \[320, 64\], and the model's is",
        ),
        (configure(num_hidden_layers=20), r"config\.json describes \d+ weights, and the files have \d+"),
        (
            configure(num_hidden_layers=2**30),
            r"config\.json describes 1073741824 layers, and the files have 30",
        ),
    ],
)
def test_an_error_names_the_file_and_the_tensor(
    source: Path, tmp_path: Path, break_it: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    break_it(folder)
    with pytest.raises(ModelLoadError, match=words):
        load(folder)


def test_tensors_that_no_decoder_needs_are_left_out(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    for name, numbers in (
        ("model.layers.0.self_attn.k_scale", torch.ones(1)),
        ("model.layers.0.attn.bias", torch.ones(1, 1, 8, 8)),
        ("model.layers.0.attn.masked_bias", torch.ones(())),
        ("mtp.0.norm.weight", torch.ones(4)),
    ):
        add(name, beside=HEAD, numbers=numbers)(folder)
    load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["separate head", "tied head"])
def test_sharded_files_have_the_weights_of_a_single_file(tmp_path: Path, tied: bool) -> None:
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": tied})
    single = save_model_of(config, tmp_path)
    AutoModelForCausalLM.from_pretrained(single).save_pretrained(tmp_path / "sharded", max_shard_size="150KB")
    models = [load(folder).state_dict() for folder in (single, tmp_path / "sharded")]
    assert not (tmp_path / "sharded" / WEIGHTS).exists()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0].keys() | models[1].keys())


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "novel", "architectures": ["NovelForCausalLM"], "auto_map": {"AutoConfig": "c.Novel"}},
        {"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "m.Novel"}},
    ],
)
def test_code_in_a_folder_is_not_run(source: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    shutil.copy(source / "config.json", tmp_path)
    configure(**fields)(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"its code is in the folder \(auto_map\), and Motet does not run it"
    ):
        build_parts(engine_config(tmp_path))


@pytest.mark.slow
def test_weights_in_pickle_format_are_converted_by_the_command_of_the_error(source: Path, tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    shutil.copy(source / "config.json", tmp_path)
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="`python -m motet"):
        load(tmp_path)
    convert.main(tmp_path, tmp_path / "new")
    found = load(tmp_path / "new").state_dict()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert (tmp_path / "new" / "tokenizer.json").exists()
