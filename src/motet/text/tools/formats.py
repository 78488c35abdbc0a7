"""The formats that Motet knows, and which of them a model's chat template is for."""

from motet.errors import ConfigError
from motet.text.tools.base import ToolFormat
from motet.text.tools.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from motet.text.tools.glm45 import GLM45
from motet.text.tools.harmony import HARMONY
from motet.text.tools.hermes import HERMES
from motet.text.tools.kimi_k2 import KIMI_K2
from motet.text.tools.llama3_json import LLAMA3_JSON, LLAMA4_JSON
from motet.text.tools.mistral import MISTRAL
from motet.text.tools.pythonic import OLMO3, PYTHONIC
from motet.text.tools.xml_calls import MINIMAX_M2, QWEN3_CODER

FORMATS: dict[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        QWEN3_CODER,
        GLM45,
        HERMES,
        MISTRAL,
        KIMI_K2,
        MINIMAX_M2,
        PYTHONIC,
        OLMO3,
        LLAMA3_JSON,
        LLAMA4_JSON,
    )
}
"""By name, those first whose marks in a template are the more special: `<tool_call>` is Hermes', and not only his."""
OTHER_NAMES = {
    "glm47": "glm45",
    "granite4": "hermes",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}
"""vLLM's, where it has several parsers for what is one format."""


def format_named(name: str) -> ToolFormat:
    """Raises `ConfigError` naming those there are."""
    found = FORMATS.get(OTHER_NAMES.get(name, name))
    if found is None:
        names = ", ".join(sorted([*FORMATS, *OTHER_NAMES, HARMONY.name]))
        raise ConfigError(f"--tool-parser {name} is unknown; there are auto, none, {names}")
    return found


def format_known_by(template: str) -> ToolFormat | None:
    """The format that a chat template's words tell of calls; None if they tell of none that is known."""
    return next((known for known in FORMATS.values() if all(mark in template for mark in known.known_by)), None)
