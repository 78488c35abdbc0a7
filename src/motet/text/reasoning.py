"""The tags of reasoning of each family of models, and the marks in chat templates that identify the family.

The names are the same as in vLLM's `--reasoning-parser` (vllm/reasoning/__init__.py). Each entry names the file in that
folder that contains its tags. Several of vLLM's parsers have the same tags, and differ only in whether reasoning is
open at the start of an answer. Motet determines this from the end of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from motet.errors import ConfigError
from motet.text.stop_strings import StopStrings


@dataclass(frozen=True, kw_only=True)
class ReasoningTags:
    names: tuple[str, ...]
    """Names of the family in `--reasoning-parser`."""
    template_marks: tuple[str, ...]
    """A chat template that contains all of these texts belongs to this family, unless an earlier family matches."""
    opening_tags: tuple[str, ...] = ("<think>",)
    closing_tags: tuple[str, ...] = ("</think>",)
    content_tags: tuple[str, ...] = ()
    """Tags before and after the content, which are not part of the content."""

    @cached_property
    def close_tags(self) -> StopStrings:
        return StopStrings(self.closing_tags)


FAMILIES: Sequence[ReasoningTags] = (
    ReasoningTags(  # mistral_reasoning_parser.py, mistral_common's SpecialTokens.begin_think
        names=("mistral",), opening_tags=("[THINK]",), closing_tags=("[/THINK]",), template_marks=("[THINK]",)
    ),
    ReasoningTags(  # granite_reasoning_parser.py; quantized models generate "Here's"
        names=("granite",),
        opening_tags=("Here is my thought process:", "Here's my thought process:"),
        closing_tags=("Here is my response:", "Here's my response:"),
        template_marks=("Here is my thought process:",),
    ),
    ReasoningTags(  # seedoss_reasoning_parser.py
        names=("seed_oss",),
        opening_tags=("<seed:think>",),
        closing_tags=("</seed:think>",),
        template_marks=("seed:think>",),
    ),
    ReasoningTags(  # minimax_m3_reasoning_parser.py
        names=("minimax_m3",),
        opening_tags=("<mm:think>",),
        closing_tags=("</mm:think>",),
        template_marks=("mm:think>",),
    ),
    ReasoningTags(  # Kimi-VL and Kimi 1.5; the name is SGLang's (reasoning_parser.py), vLLM has no parser for them
        names=("kimi",),
        opening_tags=("\u25c1think\u25b7",),
        closing_tags=("\u25c1/think\u25b7",),
        template_marks=("think\u25b7",),
    ),
    ReasoningTags(  # gemma4_reasoning_parser.py: a channel, with its name on the first line
        names=("gemma4",),
        opening_tags=("<|channel>thought",),
        closing_tags=("<channel|>",),
        template_marks=("<|channel>", "<channel|>"),
    ),
    ReasoningTags(  # cohere_command_reasoning_parser.py
        names=("cohere_command3", "cohere_command4"),
        opening_tags=("<|START_THINKING|>",),
        closing_tags=("<|END_THINKING|>",),
        template_marks=("<|START_THINKING|>",),
        content_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningTags(  # hunyuan_a13b_reasoning_parser.py
        names=("hunyuan_a13b",), template_marks=("<answer>", "<|extra_0|>"), content_tags=("<answer>", "</answer>")
    ),
    ReasoningTags(  # minimax_m2_reasoning_parser.py; in its template, <response> contains results of tools
        names=("minimax_m2",), template_marks=("minimax:tool_call", "think>")
    ),
    ReasoningTags(  # ernie45_reasoning_parser.py
        names=("ernie45",), template_marks=("<think>", "<response>"), content_tags=("<response>", "</response>")
    ),
    ReasoningTags(  # basic_parsers.py and the parsers that inherit from it
        names=(
            "think",
            "deepseek_r1",
            "deepseek_v3",
            "glm45",
            "glm47",
            "holo2",
            "kimi_k2",
            "mimo",
            "nemotron_v3",
            "olmo3",
            "qwen3",
            "step3",
            "step3p5",
        ),
        template_marks=("think>",),  # DeepSeek-R1's template has only the closing tag
    ),
)

GPT_OSS: Final = "openai_gptoss"
"""vLLM's name for the parser of harmony, the format that `text.harmony` parses."""


def tags_named(name: str) -> ReasoningTags:
    """Returns the tags of the family with this name. Raises a `ConfigError` that lists all names."""
    tags_of = {name: tags for tags in FAMILIES for name in tags.names}
    if name in tags_of:
        return tags_of[name]
    known = sorted([GPT_OSS, *tags_of])
    raise ConfigError(f"--reasoning-parser {name} is unknown; use one of auto, none, {', '.join(known)}")


def tags_of_template(template: str) -> ReasoningTags | None:
    """Returns the tags of the family that a chat template belongs to; None if the template has no tags of reasoning."""
    return next((tags for tags in FAMILIES if all(mark in template for mark in tags.template_marks)), None)
