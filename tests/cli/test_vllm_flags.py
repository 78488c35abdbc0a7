"""A command line for `vllm serve`."""

import re
from pathlib import Path

import pytest

from motet.settings.declaration import ServerCommand
from motet.settings.server_config import SETTINGS
from motet.settings.vllm_flags import ADVICE, ALIASES, SHORT, UNUSED, listed, without_unused
from tests.cli.test_servers import fails, motet

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


@pytest.mark.parametrize("command", ServerCommand)
def test_flags_of_vllm_are_read(command: ServerCommand) -> None:
    """The last flag is refused, so that nothing starts, and shows that all before it were accepted."""
    flags = [
        *("-tp=1", "--tensor-parallel-size", "1", "--pipeline-parallel-size=1", "-dp", "1", "--kv-cache-dtype", "auto"),
        *("--enable-chunked-prefill", "--enable_auto_tool_choice", "--tool_call_parser", "hermes"),
        *("--root-path", "/llm", "--enable-force-include-usage", "--return-tokens-as-token-ids"),
    ]
    flags += ["--allowed-origins", '["*", "https://a.example"]', "--default-chat-template-kwargs", '{"a": 1}']
    flags += ["--worker", "http://127.0.0.1:1"] if command is ServerCommand.GATEWAY else ["--enable-prefix-caching"]
    fails(motet(command, *flags, "--port", "70000"), 2, "--port 70000")


def test_unused_flags_are_left_out_only_with_the_value_that_changes_nothing() -> None:
    assert without_unused(["m", "-tp", "1", "--enable-auto-tool-choice", "--port", "1"]) == ["m", "--port", "1"]
    assert without_unused(["-tp", "2", "m"]) == ["--tensor-parallel-size", "2", "m"]
    assert without_unused(["--kv-cache-dtype=fp8"]) == ["--kv-cache-dtype", "fp8"]
    assert without_unused(["--enable-auto-tool-choice=no"]) == ["--enable-auto-tool-choice=no"]
    assert without_unused(["--tensor_parallel_size", "1", "--api_key=a_b", "-x_y", "m_n"]) == [
        "--api-key=a_b",
        "-x_y",
        "m_n",
    ]
    assert without_unused(["--max-loras", "4", "--max-cpu-loras=2", "--no-cohere-is-reasoning-model"]) == []
    assert without_unused(["--max-cpu-loras", "0", "--max-loras=N"]) == ["--max-cpu-loras", "0", "--max-loras", "N"]
    assert without_unused(["--tensor-parallel-size"]) == ["--tensor-parallel-size", ""]


def test_adapters_are_named_as_for_vllm() -> None:
    arguments = ["m", "--enable-lora", "--lora_modules", "a=/1", "b=/2", "--port", "1", "--lora-modules", "c=/3"]
    modules = ("--lora-modules", "a=/1", "--lora-modules", "b=/2")
    assert without_unused(arguments) == ["m", *modules, "--port", "1", "--lora-modules", "c=/3"]
    objects = ['{"name": "a"}', '{"name": "b"}']
    assert without_unused(["--lora-modules", *objects]) == ["--lora-modules", objects[0], "--lora-modules", objects[1]]
    assert listed(['{"name": "a", "path": "/1", "base_model_name": "m"}', "b=/2"]) == ["a=/1", "b=/2"]


def test_a_list_can_be_json() -> None:
    assert listed(['["*", "https://a"]', "https://b", "[x", "{}"]) == ["*", "https://a", "https://b", "[x", "{}"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--root-path", "llm"),
        ("--root-path", "/llm/"),
        ("--default-chat-template-kwargs", "[1]"),
        ("--default-chat-template-kwargs", "{a: 1}"),
    ],
)
def test_wrong_values_are_refused(flag: str, value: str) -> None:
    fails(motet("serve", flag, value), 2, f"{flag} {value}")


def test_the_page_lists_each_flag() -> None:
    named = set(re.findall(r"`(--?[a-z-]+)", PAGE.read_text()))
    aliases = {name for names in ALIASES.values() for name in names.split("/")}
    assert {*aliases, *UNUSED, *ADVICE, *SHORT} - named == set()
    assert ALIASES.keys() <= SETTINGS.keys()
