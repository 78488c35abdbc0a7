"""Motet: an OpenAI-compatible LLM server for many samples of one prompt, and its Python API.

    from motet import LLM, SamplingParams

Importing it loads no torch, and the modules of the Python API only when a name is used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.llm.async_llm import AsyncLLM
    from motet.llm.llm import LLM
    from motet.llm.outputs import (
        CompletionOutput,
        ContinuationScore,
        KeptPrompt,
        Logprob,
        RequestOutput,
        ScoreOutput,
        ToolCall,
    )
    from motet.llm.prompts import TextPrompt, TokensPrompt
    from motet.llm.requests import LoRARequest
    from motet.llm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_MODULES = {
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "ContinuationScore": "outputs",
    "KeptPrompt": "outputs",
    "LLM": "llm",
    "LoRARequest": "requests",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "ScoreOutput": "outputs",
    "StructuredOutputsParams": "sampling_params",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
    "ToolCall": "outputs",
}
"""Names of the Python API, each with its module in `motet.llm`."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ContinuationScore",
    "KeptPrompt",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Imports the module of a name at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"motet.llm.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
