"""What programs give to the Python API: sampling parameters, settings of the server, prompts."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import motet
from motet import SamplingParams, StructuredOutputsParams
from motet.api.vllm.generate import TokensRequest
from motet.errors import ConfigError, ModelLoadError, MotetError, RequestError
from motet.llm.own_server import ServerSettings
from motet.llm.prompts import checked_continuations, params_for_each
from motet.llm.sampling_params import sampling_body

MODULES = sorted(path.stem for path in Path(motet.__file__).parent.joinpath("llm").glob("*.py"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"logprobs_mode": "raw"}, "logprobs_mode"),
        ({"output_kind": 7}, "output_kind"),
        ({"keep_s": 3601}, "keep_s"),
        ({"group": "vote"}, "group"),
    ],
    ids=str,
)
def test_a_wrong_sampling_parameter_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=f"'{param}'") as raised:
        SamplingParams(**fields)
    assert raised.value.param == param
    params, ((name, value),) = SamplingParams(), fields.items()
    with pytest.raises(RequestError):
        setattr(params, name, value)
    assert params == SamplingParams()


def test_unknown_sampling_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="temprature"):
        SamplingParams().temprature = 1


@pytest.mark.parametrize("forms", [{}, {"json": "{}", "regex": "a"}, {"json_object": False}], ids=str)
def test_structured_outputs_have_one_form(forms: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="exactly one of json"):
        StructuredOutputsParams(**forms)


def test_the_server_knows_every_field_that_is_sent() -> None:
    params = SamplingParams(
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=1,
        stop="x",
        stop_token_ids=[5],
        bad_words=["bad"],
        ignore_eos=True,
        max_tokens=5,
        min_tokens=1,
        logprobs=1,
        prompt_logprobs=1,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=5,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}, disable_additional_properties=True),
        logit_bias={5: 1.0},
        allowed_token_ids=[5, 6],
        logprob_token_ids=[5],
        logprobs_mode="raw_logprobs",
        thinking_token_budget=5,
        extra_args={"a": 1},
    )
    body = sampling_body(params)
    body["logit_bias"] = {"5": 1.0}  # as JSON has it
    checked = TokensRequest.model_validate({"token_ids": [5], "sampling_params": body}).sampling_params
    for name in ("n", "temperature", "top_k", "min_p", "seed", "max_tokens", "logprobs", "thinking_token_budget"):
        assert getattr(checked, name) == getattr(params, name)
    assert checked.stop == ["x"] and checked.structured_outputs is not None


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"dtyp": "float32"}, "dtyp: there is no such setting; did you mean dtype?"),
        ({"nonsense": 1}, "nonsense: there is no such setting; docs/python.md"),
        ({"dtype": "float64"}, "dtype='float64': must be one of"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be at least 1"),
        ({"max_num_seqs": "many"}, "max_num_seqs='many': must be a whole number"),
        ({"prefill": 1}, "prefill engines need decode engines"),
        ({"port": 8000}, "port: an LLM chooses the address"),
        ({"api_key": "k"}, "api_key: an LLM chooses the address"),
        ({"worker_key": "two words"}, "worker_key=...: must be visible ASCII"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: a model runs on one device"),
        ({"trust_remote_code": True}, "trust_remote_code: code in a model's folder never runs"),
        ({"load_format": "dummy"}, "load_format='dummy': the format is in the model's folder"),
        ({"kv_cache_memory_bytes": 5}, "kv_cache_memory_bytes: use --kv-cache-gb"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False: prefill is always chunked"),
        ({"workers": ["http://a"]}, "workers: there is no such setting"),
        ({"adapters": 5}, "adapters=5: must be a list of texts"),
        ({"default_chat_template_kwargs": "no JSON"}, "default_chat_template_kwargs='no JSON': must be a JSON object"),
        ({"config": 5}, "config=5: must be the path"),
        ({"config": "/absent.toml"}, "there is no such file"),
        ({"model": "./absent"}, "./absent: there is no such folder"),
        ({"model": "smolm2"}, "did you mean smollm2?"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_before_the_server_starts(settings: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError)) as raised:
        ServerSettings(settings, environ={})
    assert isinstance(raised.value, MotetError) and error in raised.value.message


@pytest.mark.parametrize("values", [{"max_tokens": 5}, [{"max_tokens": 5}], 5, "n=2", [None]], ids=str)
def test_other_types_than_sampling_params_are_refused(values: Any) -> None:
    with pytest.raises(RequestError, match="Invalid type for 'sampling_params': expected SamplingParams") as raised:
        params_for_each(values, 1)
    assert raised.value.param == "sampling_params"


@pytest.mark.parametrize("values", [" Paris", {" Paris": 1}, 5, None], ids=str)
def test_continuations_are_a_list(values: Any) -> None:
    with pytest.raises(RequestError, match="Invalid type for 'continuations': expected a list"):
        checked_continuations(values)


class TorchDtype:
    """`torch.float`, without the time to import torch."""

    def __str__(self) -> str:
        return "torch.float32"


def test_settings_become_flags_and_secrets_stay_out_of_the_command_line() -> None:
    settings = ServerSettings(
        {
            "model": "smollm2",
            "dtype": TorchDtype(),
            "threads": 2,
            "enable_prefix_caching": False,
            "lora_modules": [{"name": "a", "path": "/x"}, "b=/y"],
            "default_chat_template_kwargs": {"enable_thinking": False},
            "queue_timeout_s": 5,
            "cluster_key": "hidden",
            "admin_key": "chosen",
            "tensor_parallel_size": 1,
            "load_format": "auto",
            "disable_log_stats": True,
            "trust_remote_code": False,
            "revision": None,
            "log_level": "info",
        },
        environ={"MOTET_PORT": "1", "MOTET_UDS": "/socket", "HOME": "/home"},
    )
    assert settings.arguments() == [
        *("--host", "127.0.0.1", "--model", "smollm2", "--dtype", "float32", "--threads", "2", "--no-prefix-cache"),
        *("--adapter", "a=/x", "--adapter", "b=/y", "--default-chat-template-kwargs", '{"enable_thinking": false}'),
        *("--queue-timeout", "5.0", "--log-level", "info", "--trust-request-chat-template"),
    ]
    assert settings.environ(api_key="k", admin_key="a") == {
        "HOME": "/home",
        "MOTET_API_KEYS": "k",
        "MOTET_ADMIN_KEY": "chosen",
        "MOTET_CLUSTER_KEY": "hidden",
    }


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_are_true(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"motet.llm.{name}".removesuffix(".__init__")))
    assert not results.failed


def test_every_name_of_the_package_can_be_imported() -> None:
    for name in motet.__all__:
        assert getattr(motet, name) is not None
        assert name in dir(motet)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = motet.LLMs


@pytest.mark.slow
def test_importing_the_package_imports_neither_torch_nor_httpx() -> None:
    code = "import sys, motet; print(*[m for m in ('torch', 'httpx', 'motet.llm', 'msgspec') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
    code = "import sys; from motet import LLM; print(*[m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
