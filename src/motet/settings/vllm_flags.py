"""Flags of `vllm serve`, so that a command line for vLLM can stay as it is. docs/migrating.md lists them.

ALIASES     other names of flags that Motet has
VALUES      other names of their values
UNUSED      flags that change nothing here, with the only value that is accepted, or with any number
ADVICE      what to do instead of a flag that is refused; flags of Motet with similar names would not help"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

ALIASES: Final[Mapping[str, str]] = {
    "tool_parser": "--tool-call-parser",
    "cors_origins": "--allowed-origins",
    "drain_timeout_s": "--shutdown-timeout",
    "prefix_cache": "--enable-prefix-caching/--no-enable-prefix-caching",
    "adapters": "--lora-modules",
    "max_adapter_rank": "--max-lora-rank",
}
"""vLLM's flags, by the names of Motet's settings."""
VALUES: Final[Mapping[str, Mapping[str, str]]] = {"dtype": {"half": "float16", "float": "float32"}}
"""Motet's names of values, by the names of Motet's settings and by vLLM's names."""
SWITCH: Final = ""
NUMBER: Final = "N"
"""Any number from 1 on."""
UNUSED: Final[Mapping[str, str]] = {
    "--tensor-parallel-size": "1",
    "--pipeline-parallel-size": "1",
    "--data-parallel-size": "1",
    "--kv-cache-dtype": "auto",
    "--load-format": "auto",
    "--tokenizer-mode": "auto",
    "--runner": "generate",
    "--disable-log-stats": SWITCH,
    "--disable-custom-all-reduce": SWITCH,
    "--async-scheduling": SWITCH,
    "--no-async-scheduling": SWITCH,
    "--enable-auto-tool-choice": SWITCH,
    "--enable-chunked-prefill": SWITCH,
    "--enable-scale-out": SWITCH,
    "--enable-lora": SWITCH,
    "--max-loras": NUMBER,
    "--max-cpu-loras": NUMBER,
    "--cohere-is-reasoning-model": SWITCH,
    "--no-cohere-is-reasoning-model": SWITCH,
}
LORA_MODULES: Final = "--lora-modules"
SHORT: Final[Mapping[str, str]] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
}
ADVICE: Final[Mapping[str, str]] = {
    "--tensor-parallel-size": "a model runs on one device, so it can only be 1",
    "--pipeline-parallel-size": "a model runs on one device, so it can only be 1",
    "--data-parallel-size": "start several servers, and motet gateway in front of them",
    "--trust-remote-code": "code in a model's folder never runs; omit it",
    "--no-enable-chunked-prefill": "prefill is always chunked",
    "--kv-cache-dtype": "the KV cache has the dtype of the model, so it can only be auto",
    "--load-format": "the format is in the model's folder, so it can only be auto",
    "--tokenizer-mode": "the tokenizer is transformers', so it can only be auto",
    "--runner": "models only generate, so it can only be generate",
    "--kv-cache-memory-bytes": "use --kv-cache-gb",
    "--swap-space": "KV is computed again or evicted, never swapped; omit it",
    "--kv-transfer-config": "use --prefill and --decode, or --role",
    "--ssl-cert-reqs": "--ssl-ca-certs requires client certificates",
    "--enable-ssl-refresh": "SIGHUP makes the server read its certificates again",
    "--tokens-only": "every server has a tokenizer; /inference/v1/generate returns only tokens by default",
    "--max-loras": "it must be a number from 1 on",
    "--max-cpu-loras": "it must be a number from 1 on",
    "--fully-sharded-loras": "a model runs on one device; omit it",
    "--disable-log-requests": "use --log-level warning",
}


def without_unused(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without flags that change nothing. A flag with another value stays, and is refused. Flags
    can have underscores in place of hyphens, as in vLLM."""
    kept: list[str] = []
    rest = iter(repeated(arguments))
    for argument in rest:
        flag, equals, value = argument.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else SHORT.get(flag, flag)
        accepted = UNUSED.get(flag)
        if accepted is None or (accepted == SWITCH and equals):
            kept.append(flag + equals + value)
        elif accepted != SWITCH and not _is_unused(given := value if equals else next(rest, ""), accepted):
            kept += [flag, given]
    return kept


def _is_unused(value: str, accepted: str) -> bool:
    return value == accepted if accepted != NUMBER else value.isdecimal() and value.strip("0") != ""


def repeated(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with one `--lora-modules` for each adapter, since vLLM's flag takes several: `a=1 b=2`, or
    JSON objects."""
    found: list[str] = []
    after_modules = False
    for argument in arguments:
        is_adapter = argument.startswith("{") or ("=" in argument and not argument.startswith("-"))
        if after_modules and is_adapter and found[-1].replace("_", "-") != LORA_MODULES:
            found.append(LORA_MODULES)
        after_modules = argument.replace("_", "-") == LORA_MODULES or (after_modules and is_adapter)
        found.append(argument)
    return found


def listed(texts: Sequence[str]) -> list[str]:
    """Returns the items of a list flag. vLLM's `--allowed-origins` takes a JSON list, such as `["*"]`, and its
    `--lora-modules` takes JSON objects with a name and a path."""
    items: list[str] = []
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict) and {"name", "path"} <= value.keys():
            items.append(f"{value['name']}={value['path']}")
        else:
            items += map(str, value) if isinstance(value, list) else [text]
    return items
