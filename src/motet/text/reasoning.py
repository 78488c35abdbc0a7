"""How families of models mark their thoughts, and how the chat template of each is recognised.

Names are those of vLLM's `--reasoning-parser` (vllm/reasoning/__init__.py); each entry says in which file of that
folder its tags stand. Several of its parsers read the same tags and differ in whether a thought is open from the start;
here the end of the prompt decides that.
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
    """The family's names in `--reasoning-parser`."""
    known_by: tuple[str, ...]
    """A chat template that contains all of these belongs to this family, unless it fits one further up."""
    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    around_answer: tuple[str, ...] = ()
    """Tags that stand around the content, and are not shown."""

    @cached_property
    def close_tags(self) -> StopStrings:
        return StopStrings(self.closes)


FAMILIES: Sequence[ReasoningTags] = (
    ReasoningTags(  # mistral_reasoning_parser.py, mistral_common's SpecialTokens.begin_think
        names=("mistral",), opens=("[THINK]",), closes=("[/THINK]",), known_by=("[THINK]",)
    ),
    ReasoningTags(  # granite_reasoning_parser.py; quantized ones say "Here's"
        names=("granite",),
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
        known_by=("Here is my thought process:",),
    ),
    ReasoningTags(  # seedoss_reasoning_parser.py
        names=("seed_oss",), opens=("<seed:think>",), closes=("</seed:think>",), known_by=("seed:think>",)
    ),
    ReasoningTags(  # minimax_m3_reasoning_parser.py
        names=("minimax_m3",), opens=("<mm:think>",), closes=("</mm:think>",), known_by=("mm:think>",)
    ),
    ReasoningTags(  # Kimi-VL and Kimi 1.5; SGLang's name (reasoning_parser.py), vLLM has none
        names=("kimi",), opens=("\u25c1think\u25b7",), closes=("\u25c1/think\u25b7",), known_by=("think\u25b7",)
    ),
    ReasoningTags(  # gemma4_reasoning_parser.py: a channel, with its name on the first line
        names=("gemma4",), opens=("<|channel>thought",), closes=("<channel|>",), known_by=("<|channel>", "<channel|>")
    ),
    ReasoningTags(  # cohere_command_reasoning_parser.py
        names=("cohere_command3", "cohere_command4"),
        opens=("<|START_THINKING|>",),
        closes=("<|END_THINKING|>",),
        known_by=("<|START_THINKING|>",),
        around_answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningTags(  # hunyuan_a13b_reasoning_parser.py
        names=("hunyuan_a13b",), known_by=("<answer>", "<|extra_0|>"), around_answer=("<answer>", "</answer>")
    ),
    ReasoningTags(  # minimax_m2_reasoning_parser.py; tool results stand in <response> there
        names=("minimax_m2",), known_by=("minimax:tool_call", "think>")
    ),
    ReasoningTags(  # ernie45_reasoning_parser.py
        names=("ernie45",), known_by=("<think>", "<response>"), around_answer=("<response>", "</response>")
    ),
    ReasoningTags(  # basic_parsers.py and those that build on it
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
        known_by=("think>",),  # DeepSeek-R1's template knows only the closing tag
    ),
)

GPT_OSS: Final = "openai_gptoss"
"""vLLM's name for answers that `text.harmony` reads."""


def tags_named(name: str) -> ReasoningTags:
    """Raises `ConfigError`, which lists all names."""
    for tags in FAMILIES:
        if name in tags.names:
            return tags
    known = sorted([GPT_OSS, *(name for tags in FAMILIES for name in tags.names)])
    raise ConfigError(f"--reasoning-parser {name} is unknown; there are auto, none, {', '.join(known)}")


def tags_known_by(template: str) -> ReasoningTags | None:
    """Returns the tags of the family that a chat template belongs to; None if it mentions no thoughts."""
    return next((tags for tags in FAMILIES if all(mark in template for mark in tags.known_by)), None)
