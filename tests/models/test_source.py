"""The name of a model is resolved to a folder."""

from pathlib import Path

import pytest

from motet.errors import ModelLoadError
from motet.models.model_source import public_name, resolve, resolve_tokenizer
from motet.models.smollm2 import FOLDER
from tests.models.model_folders import write_model


def test_a_folder_is_used_in_place(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert resolve(str(folder), cache=tmp_path) == folder


def test_other_programs_load_a_model_by_its_path_or_its_name_on_the_hub(tmp_path: Path) -> None:
    """`root` in `/v1/models` was the name in requests, from which no benchmark can load a tokenizer."""
    assert public_name(str(write_model(tmp_path / "m" / ".." / "m"))) == str(tmp_path / "m")
    assert public_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert public_name("org/name") == "org/name"


def test_the_default_model_comes_from_the_cache_when_it_exists(tmp_path: Path) -> None:
    write_model(tmp_path / FOLDER)
    assert resolve("smollm2", cache=tmp_path) == tmp_path / FOLDER
    assert resolve_tokenizer("smollm2", cache=tmp_path) == tmp_path / FOLDER


def test_a_tokenizer_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer(str(tmp_path), cache=tmp_path) == tmp_path
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        resolve_tokenizer(str(tmp_path), cache=tmp_path)


@pytest.mark.parametrize("name", ["./gone", "/gone", "~/gone-model", "../gone"])
def test_a_path_without_a_folder_is_not_searched_on_the_hub(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no such folder"):
        resolve(name, cache=tmp_path)


def test_a_file_is_refused_as_a_model(tmp_path: Path) -> None:
    file = tmp_path / "m.bin"
    file.touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve(str(file), cache=tmp_path)


@pytest.mark.parametrize("name", ["a/b/c", "a b", "über/modell?"])
def test_the_error_for_an_invalid_name_states_what_is_allowed(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="neither a folder nor a name on the hub"):
        resolve(name, cache=tmp_path)


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm-2"])
def test_a_misspelt_default_model_is_suggested(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="did you mean smollm2"):
        resolve(name, cache=tmp_path)
