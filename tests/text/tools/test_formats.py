"""Which format a model writes is told by name, or by the words of its chat template."""

import pytest

from motet.errors import ConfigError
from motet.text.tools.call_ids import call_id, mistral_call_id
from motet.text.tools.formats import FORMATS, OTHER_NAMES, format_known_by, format_named

DEEPSEEK_CALLS, DEEPSEEK_CALL = FORMATS["deepseek_v3"].begins[0], FORMATS["deepseek_v3"].inner[0]
LINES = {
    "hermes": r"""\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>""",
    "qwen3_coder": r"""<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</p""",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "llama3_json": """{{- '<|start_header_id|>assistant<|end_header_id|>' }} {{- '"parameters": ' }}""",
    "llama4_json": """{{- '<|header_start|>assistant<|header_end|>' -}} {{- '"parameters": ' }}""",
    "mistral": """{{- "[TOOL_CALLS] [" }}""",
    "deepseek_v3": f"'{DEEPSEEK_CALLS}{DEEPSEEK_CALL}' + tool['type'] + '\\n' + '```json' + '\\n'",
    "deepseek_v31": f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}tool_call_name",
    "kimi_k2": "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>",
    "minimax_m2": """{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{{- '<invoke name="' + tool_call""",
    "olmo3": """{{ '<function_calls>' }}{{ message['function_calls'] }}""",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
}
"""What the published templates of each say of calls."""


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_is_known_by_what_it_says_of_calls(name: str) -> None:
    known = format_known_by(f"{{% for message in messages %}} {LINES[name]} {{% endfor %}}")
    assert known is FORMATS[name]


def test_a_template_that_says_nothing_of_calls_is_for_no_format() -> None:
    assert format_known_by("{% for message in messages %}<|start_header_id|>{{ message.content }}{% endfor %}") is None


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_found_by_its_name(name: str) -> None:
    assert format_named(name).name == name


@pytest.mark.parametrize(("other", "name"), OTHER_NAMES.items())
def test_other_names_of_vllm_are_the_same_format(other: str, name: str) -> None:
    assert format_named(other) is FORMATS[name]


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--tool-parser gpt is unknown; there are auto, none, deepseek_v3, .*qwen3_"):
        format_named("gpt")


def test_no_two_ids_are_equal_and_mistrals_are_9_letters_and_digits() -> None:
    ids = {mistral_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)
    assert len({call_id() for _ in range(100)}) == 100
    assert call_id().startswith("call_")
