"""Log-probabilities in the two forms OpenAI has: of chat, and of completions. Also the echo of a prompt."""

from collections.abc import Sequence
from typing import TypedDict

import msgspec

from motet.text.detokenize import Detokenizer
from motet.text.tokenizer import Tokenizer
from motet.types import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for (OpenAI's and vLLM's value)."""


class ChatTopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatTopLogprob):
    """An element of `logprobs.content` of a chat choice."""

    top_logprobs: list[ChatTopLogprob]


class CompletionLogprobs(TypedDict):
    """`logprobs` of a completions choice; the lists are equally long."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, num_top: int) -> list[ChatLogprob]:
    return [
        {
            **_chat_entry(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_entry(tokenizer, token_id, value) for token_id, value in entry.top[:num_top]],
        }
        for entry in logprobs
    ]


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offsets: Sequence[int], *, num_top: int, base: int = 0
) -> CompletionLogprobs:
    """`base`: characters before the answer, of an echoed prompt. The drawn token is among its top ones, as the last
    if it is not one of the `num_top`."""
    return {
        "tokens": [tokenizer.token_text(entry.token_id) for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [_top_by_text(tokenizer, entry, num_top) for entry in logprobs],
        "text_offset": [base + offset for offset in offsets],
    }


class Echo(msgspec.Struct, frozen=True):
    """A prompt as `echo` shows it."""

    text: str
    offsets: tuple[int, ...]
    """One a token: where its text begins."""


def echo(tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Echo:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    text, offsets, begins = "", [], 0
    for token_id in prompt:
        offsets.append(begins)
        if piece := detokenizer.feed(token_id):
            text += piece
            begins = len(text)
    return Echo(text + detokenizer.close(), tuple(offsets))


def prompt_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    *,
    num_top: int,
) -> CompletionLogprobs:
    """The part of an echoed prompt; its first token has no log-probability, nothing comes before it."""
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in prompt],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [None if entry is None else _top_by_text(tokenizer, entry, num_top) for entry in logprobs],
        "text_offset": list(offsets),
    }


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> ChatTopLogprob:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _top_by_text(tokenizer: Tokenizer, entry: TokenLogprob, num_top: int) -> dict[str, float]:
    """Of tokens that look alike (parts of characters) the likeliest stays, but the drawn one has its own value."""
    top: dict[str, float] = {}
    for token_id, logprob in entry.top[:num_top]:
        top.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    top[tokenizer.token_text(entry.token_id)] = _finite(entry.logprob)
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
