"""The defaults of sampling fields: the values that are allowed, and where they come from."""

import json
from pathlib import Path

import pytest

from motet.deploy.server_plan import default_sampling_params, generation_folder
from motet.errors import ConfigError
from motet.sampling_defaults import DefaultRules, faulty_default, read_defaults, read_override
from motet.settings.engine_config import ModelConfig

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}
READ = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
ALL = {
    "temperature": 0,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_new_tokens": 9,
}


def test_the_file_of_qwen3_has_its_three_defaults() -> None:
    assert read_defaults(QWEN3) == READ


def test_every_field_is_read_with_the_type_and_the_name_of_sampling_params() -> None:
    read = read_defaults({**ALL, "top_k": 20.0})
    expected = {"max_tokens": 9, "temperature": 0.0, "top_p": 1.0, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert [(name, value, type(value)) for name, value in read.items()] == [
        (name, value, type(value)) for name, value in expected.items()
    ]
    assert faulty_default(read) is None


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": None, "top_k": -1}, {"top_k": 0}),
    ],
    ids=str,
)
def test_values_without_a_default_of_their_own(given: dict[str, object], read: dict[str, object]) -> None:
    assert read_defaults(given) == read


WRONG = [
    *[("temperature", value) for value in (-0.1, 2.1, "0.6", True, [0.6], float("nan"))],
    *[("top_p", 0), ("top_k", 0.5), ("top_k", -2), ("min_p", 1.1), ("repetition_penalty", 0), ("max_new_tokens", 0)],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_a_value_that_requests_could_not_have_is_refused_with_its_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^'{name}' is .*, and must be a number: ") as refused:
        read_defaults({name: value})
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "not an object"),
        ('{"do_sample": false}', "'do_sample' is not one of the fields max_new_tokens, temperature, "),
        ('{"max_tokens": 5}', "'max_tokens' is not one of the fields"),
        ('{"top_p": 2}', "'top_p' is 2, and must be a number: above 0, up to 1"),
        ('{"top_k": ' + "9" * 5000 + "}", "it is not JSON"),
    ],
    ids=["no JSON", "list", "no default", "other name", "out of range", "too long"],
)
def test_an_override_that_no_request_could_have_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_override([text])


@pytest.mark.parametrize(
    ("setting", "override", "expected"),
    [
        ("auto", None, READ),
        ("none", None, {}),
        ("vllm", None, {}),
        ("other", None, {"min_p": 0.1}),
        (
            "auto",
            {"temperature": 1, "top_k": None, "max_new_tokens": 5},
            {"temperature": 1, "top_p": 0.95, "max_tokens": 5},
        ),
        ("none", {"top_p": 0.5}, {"top_p": 0.5}),
    ],
    ids=str,
)
def test_the_settings_of_a_server(
    tmp_path: Path, setting: str, override: dict[str, object] | None, expected: dict[str, object]
) -> None:
    for folder, values in (("model", QWEN3), ("other", {"min_p": 0.1})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "generation_config.json").write_text(json.dumps(values))
    model = ModelConfig(
        generation_config=str(tmp_path / "other") if setting == "other" else setting,
        override_generation_config=None if override is None else json.dumps(override),
    )
    assert default_sampling_params(model, generation_folder(model) or tmp_path / "model") == expected


def test_a_file_with_a_wrong_value_is_refused_unless_the_value_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match=f"^{file}: 'top_p' is 7, .*--override-generation-config can replace it"):
        default_sampling_params(ModelConfig(), tmp_path)
    for text, expected in (('{"top_p": null}', {}), ('{"top_p": 0.5}', {"top_p": 0.5})):
        assert default_sampling_params(ModelConfig(override_generation_config=text), tmp_path) == expected


def test_a_folder_without_the_file_is_refused_and_a_model_without_it_has_no_defaults(tmp_path: Path) -> None:
    assert default_sampling_params(ModelConfig(), tmp_path) == {}
    with pytest.raises(ConfigError, match=r"--generation-config .*: there is no generation_config\.json"):
        generation_folder(ModelConfig(generation_config=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"--generation-config .*: there is no such folder; give auto"):
        generation_folder(ModelConfig(generation_config=str(tmp_path / "none")))


NAMES = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"}


@pytest.mark.parametrize(
    ("rules", "reported", "values", "unknown"),
    [
        (DefaultRules(), READ, READ, set()),
        (DefaultRules(), None, {}, NAMES),
        (DefaultRules(replaced={}), READ, {}, set()),
        (DefaultRules(replaced={}), None, {}, set()),
        (DefaultRules(override={"top_p": 0.5, "top_k": None}), READ, {"temperature": 0.6, "top_p": 0.5}, set()),
        (DefaultRules(override={"top_p": 0.5, "top_k": None}), None, {"top_p": 0.5}, NAMES - {"top_p", "top_k"}),
    ],
    ids=["workers'", "not reported", "none", "none for vLLM", "overridden", "overridden for vLLM"],
)
def test_the_rules_of_a_gateway(
    rules: DefaultRules, reported: dict[str, int | float] | None, values: dict[str, object], unknown: set[str]
) -> None:
    assert rules.values(reported) == values
    assert rules.unknown(reported) == unknown


@pytest.mark.parametrize("values", [{"top_p": 0}, {"top_k": 1.5}, {"seed": 1}, {"temperature": float("nan")}], ids=str)
def test_a_report_with_a_default_that_no_request_could_have_is_found(values: dict[str, int | float]) -> None:
    assert faulty_default(values) == next(iter(values))
