"""The model and the request determine the format in which an answer is parsed."""

import pytest
from tokenizers import AddedToken

from motet.errors import ConfigError
from motet.text.formats import FORMATS, OTHER_NAMES, ModelFormats, ParserNames, format_named, format_of_template
from motet.text.parts import Content, Part, Reasoning
from motet.text.reasoning import FAMILIES, tags_of_template
from motet.text.tokenizer import Tokenizer
from motet.text.tools.tool_format import ToolRules
from motet.types import Thinking
from tests.text.small_format import joined, tool_rules
from tests.tiny_tokenizer import build_tiny_tokenizer

QWEN3 = """
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
<tool_call>{"name": ..., "arguments": ...}</tool_call>"""
GPT_OSS = "<|start|>assistant<|channel|>analysis<|message|> ... functions."
TOOLS = tool_rules("f")

TEMPLATES = {
    # The part of each template that is about reasoning.
    "mistral": "{{ '[THINK]' + block['thinking'] + '[/THINK]' }}",
    "granite": "Respond to every user query in a comprehensive and detailed way. Write your thought process after "
    "'Here is my thought process:' and write your response after 'Here is my response:'",
    "seed_oss": "{%- set think_begin_token = '<seed:think>' -%}",
    "minimax_m3": "{{ '<mm:think>' }}",
    "kimi": "{{ content.split('\u25c1/think\u25b7')[-1] }}",
    "gemma4": "{{ '<|channel>thought\n<channel|>' }}",
    "cohere_command3": "{{ '<|START_THINKING|>' }}...{{ '<|END_THINKING|>' }}",
    "hunyuan_a13b": "{{ '<|extra_0|>' }}{{ content.split('<answer>')[-1] }}{{ '<think>\n\n</think>\n' }}",
    "minimax_m2": """{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{{ '\\n<response>' }}...{{ '<think>' }}""",
    "ernie45": "{{ '<think>\n' }}...{{ '<response>\n' }}",
    "think": "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}",  # R1's
}


DEEPSEEK_CALLS, DEEPSEEK_CALL = FORMATS["deepseek_v3"].opening_tags[0], FORMATS["deepseek_v3"].inner_tags[0]
CALL_TEMPLATES = {
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
"""The part of each published template that is about calls."""


def formats(tokenizer: Tokenizer, template: str = QWEN3, **names: str) -> ModelFormats:
    return ModelFormats.of(tokenizer, template, names=ParserNames(**names))


def read(
    made: ModelFormats, prompt: str, answer: str, *, continued: str = "", tools: ToolRules | None = None
) -> list[Part]:
    """Returns the parts of an answer, or the answer as content if its format has no parts."""
    form = made.for_request(made.tokenizer.encode(prompt), continued=continued, tools=tools)
    if form is None:
        return [Content(answer)]
    parser = form.parser()
    return joined(parser.feed(answer, [1]) + parser.close(cut=False))


def test_every_family_has_its_own_names_and_is_identified_by_its_template() -> None:
    names = [name for tags in FAMILIES for name in tags.names]
    assert len(set(names)) == len(names)
    assert [tags_of_template(template) for template in TEMPLATES.values()] == list(FAMILIES)
    assert all(name in tags.names for name, tags in zip(TEMPLATES, FAMILIES, strict=True))
    assert tags_of_template("{{ messages }}") is None


def test_the_operator_can_name_the_formats_that_the_template_does_not_show(tokenizer: Tokenizer) -> None:
    plain = formats(tokenizer, "{{ messages }}")
    assert plain.reasoning is None
    assert formats(tokenizer, "{{ messages }}", reasoning="glm45").reasoning == tags_of_template("<think>")
    assert formats(tokenizer, reasoning="none").reasoning is None
    named = formats(tokenizer, tools="mistral").tools
    assert named is not None
    assert named.name == "mistral"
    assert formats(tokenizer, tools="none").tools is None


def test_the_format_of_calls_is_hermes_unless_the_template_shows_another_one(tokenizer: Tokenizer) -> None:
    r1 = "{%- if message['tool_calls'] %}{{ '<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581sep\uff5c>' }}"
    for template in ("{{ messages }}", None, r1, "{{ tools }}"):
        found = ModelFormats.of(tokenizer, template).tools
        assert found is not None
        assert found.name == "hermes"


NAMES_REFUSED = [
    ({"reasoning": "qwen"}, "--reasoning-parser qwen is unknown; use one of auto, none, .*openai_gptoss, .*qwen3"),
    ({"tools": "qwen"}, "--tool-parser qwen is unknown; use one of auto, none, deepseek_v3, .*hermes"),
    ({"tools": "openai", "reasoning": "qwen3"}, "are for different models"),
    ({"tools": "hermes", "reasoning": "openai_gptoss"}, "are for different models"),
]


@pytest.mark.parametrize(("names", "message"), NAMES_REFUSED)
def test_unknown_names_and_half_of_harmony_are_refused(names: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParserNames(**names)


def test_there_is_no_format_without_tools_and_reasoning(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    plain = formats(tokenizer, "{{ messages }}")
    assert plain.for_request(prompt) is None
    assert plain.for_request(prompt, tools=TOOLS) is not None
    assert formats(tokenizer, tools="none").for_request(tokenizer.encode("</think>"), tools=TOOLS) is None


def test_the_end_of_the_prompt_shows_whether_reasoning_is_open(tokenizer: Tokenizer) -> None:
    made = formats(tokenizer)
    for prompt, answer, parts in (
        ("assistant\n", "<think>a</think>b", [Reasoning("a"), Content("b")]),
        ("assistant\n<think>\n", "a</think>b", [Reasoning("a"), Content("b")]),
        ("assistant\n<think>\n\n</think>\n\n", "<think>a", [Content("<think>a")]),
        ("assistant</think>", "a</think>b", [Content("a</think>b")]),
        ("What is <think>?\nassistant\n", "a tag", [Content("a tag")]),
    ):
        assert read(made, prompt, answer) == parts


def test_tags_around_the_content_are_dropped_even_without_reasoning(tokenizer: Tokenizer) -> None:
    made = formats(tokenizer, TEMPLATES["hunyuan_a13b"])
    assert read(made, "<think>\n\n</think>\n", "<answer>\na\n</answer>") == [Content("a")]


def test_the_end_of_a_continued_message_shows_whether_reasoning_is_open(tokenizer: Tokenizer) -> None:
    made = formats(tokenizer)
    for continued, answer, parts in (
        (" <think>so", " a</think> b", [Reasoning(" a"), Content("b")]),
        ("<think>\n", " a</think> b", [Reasoning("a"), Content("b")]),
        ("<think>a</think>b", " c", [Content(" c")]),
        ("b <think>", " c</think>", [Content(" c</think>")]),
        (" \n", "<think>a", [Reasoning("a")]),
    ):
        assert read(made, f"assistant\n{continued}", answer, continued=continued) == parts


def test_reasoning_can_precede_the_text_of_a_grammar(tokenizer: Tokenizer) -> None:
    made = formats(tokenizer)
    possible, opened, closed = map(tokenizer.encode, ("assistant\n", "<think>\n", "<think>\n\n</think>\n\n"))
    assert made.thinking(possible) == Thinking("<think>", "</think>", opened=False)
    assert made.thinking(opened) == Thinking("<think>", "</think>", opened=True)
    assert made.thinking(possible, continued="<think>a") == Thinking("<think>", "</think>", opened=True)
    assert made.thinking(closed) is None
    assert formats(tokenizer, reasoning="none").thinking(opened) is None


def test_special_tokens_that_are_tags_are_visible_to_the_formats_that_use_them() -> None:
    backend = build_tiny_tokenizer()
    texts = ["<think>", "<|channel>", "</think>", "<tool_call>", "<|channel|>"]
    backend.add_special_tokens([AddedToken(text, special=True) for text in texts])
    think, channel, closing, calling, harmony = (backend.token_to_id(text) for text in texts)

    def visible(made: ModelFormats, tools: ToolRules | None) -> frozenset[int]:
        form = made.for_request((), tools=tools)
        assert form is not None
        return form.visible

    made = formats(Tokenizer(backend))
    assert visible(made, None) == {think, closing}
    assert visible(made, TOOLS) == {think, closing, calling}
    assert visible(formats(Tokenizer(backend), TEMPLATES["gemma4"]), None) == {channel}
    assert visible(formats(Tokenizer(backend), GPT_OSS), None) == {harmony}


@pytest.mark.parametrize("names", [{"tools": "hermes"}, {"reasoning": "qwen3"}])
def test_the_operator_s_choice_overrides_a_template_of_gpt_oss(tokenizer: Tokenizer, names: dict[str, str]) -> None:
    assert not formats(tokenizer, GPT_OSS, **names).harmony


@pytest.mark.slow
def test_answers_of_gpt_oss_are_parsed_as_harmony(tokenizer: Tokenizer) -> None:
    answer = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    for made in (
        formats(tokenizer, GPT_OSS),
        formats(tokenizer, GPT_OSS, tools="none"),
        formats(tokenizer, reasoning="openai_gptoss"),
        formats(tokenizer, tools="openai"),
    ):
        assert read(made, "assistant", answer, tools=TOOLS) == [Reasoning("a"), Content("b")]
        assert made.thinking((), calls=True) is None
    assert formats(tokenizer, GPT_OSS, tools="none", reasoning="none").for_request((), tools=TOOLS) is None


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_is_identified_by_its_text_about_calls(name: str) -> None:
    found = format_of_template(f"{{% for message in messages %}} {CALL_TEMPLATES[name]} {{% endfor %}}")
    assert found is FORMATS[name]


def test_a_template_that_does_not_mention_calls_has_no_format() -> None:
    assert (
        format_of_template("{% for message in messages %}<|start_header_id|>{{ message.content }}{% endfor %}") is None
    )


@pytest.mark.parametrize(("given", "name"), [*zip(FORMATS, FORMATS, strict=True), *OTHER_NAMES.items()])
def test_a_format_is_found_by_its_name_and_by_vllms_other_names(given: str, name: str) -> None:
    assert format_named(given) is FORMATS[name]
    assert FORMATS[name].name == name


def test_ids_of_calls_differ_and_mistrals_are_9_letters_and_digits() -> None:
    ids = {FORMATS["mistral"].new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)
    assert len({FORMATS["hermes"].new_call_id() for _ in range(100)}) == 100
    assert FORMATS["hermes"].new_call_id().startswith("call_")
