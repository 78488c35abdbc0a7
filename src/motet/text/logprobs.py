"""Log-probabilities in the two forms that OpenAI has, for chat and for completions; and the echo of a prompt."""

from collections.abc import Sequence

import msgspec

from motet.text.detokenize import Detokenizer
from motet.text.tokenizer import Tokenizer
from motet.types import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for (OpenAI's and vLLM's value)."""


ChatLogprob = dict[str, object]
"""An element of `logprobs.content` of a chat choice, or of the `top_logprobs` in one."""
CompletionLogprobs = dict[str, list[object]]
"""`logprobs` of a completions choice; the lists are equally long."""


def chat_logprobs(tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprob], *, num_top: int) -> list[ChatLogprob]:
    """`tokenizer`: None if there is no text; tokens are then written as `token_id:5`, as in vLLM."""
    return [
        {
            **_chat_entry(tokenizer, entry.token_id, logprob=entry.logprob),
            "top_logprobs": [_chat_entry(tokenizer, id, logprob=value) for id, value in entry.top[:num_top]],
        }
        for entry in logprobs
    ]


class PromptEcho(msgspec.Struct, frozen=True):
    """A prompt as the field `echo` shows it."""

    text: str
    offsets: tuple[int, ...]
    """Where the text of each token begins."""


def echo(tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> PromptEcho:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    text, offsets, begins = "", [], 0
    for token_id in prompt:
        offsets.append(begins)
        if piece := detokenizer.feed(token_id):
            text += piece
            begins = len(text)
    return PromptEcho(text + detokenizer.close(), tuple(offsets))


def completion_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    logprobs: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    num_top: int,
) -> CompletionLogprobs:
    """Returns the form for an answer, or for an echoed prompt, whose first token has no log-probability.

    The top tokens include the token itself, as the last one if it is not among the `num_top`.
    """
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [None if one is None else _top_by_text(tokenizer, one, num_top=num_top) for one in logprobs],
        "text_offset": list(offsets),
    }


def ranked_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None], *, num_top: int
) -> list[dict[int, dict[str, object]] | None]:
    """Returns vLLM's form for a prompt: for each token but the first, the likeliest ones by their ids, the prompt's own
    before them."""

    def entry_of(entry: TokenLogprob) -> dict[int, dict[str, object]]:
        likeliest = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:num_top], start=1)}
        every = {entry.token_id: (entry.logprob, entry.rank)} | likeliest
        return {
            token: {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}
            for token, (logprob, rank) in every.items()
        }

    return [None if entry is None else entry_of(entry) for entry in logprobs]


def _chat_entry(tokenizer: Tokenizer | None, token_id: int, *, logprob: float) -> ChatLogprob:
    if tokenizer is None:
        return {"token": f"token_id:{token_id}", "logprob": _finite(logprob), "bytes": None}
    text, written = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(written)}


def _top_by_text(tokenizer: Tokenizer, entry: TokenLogprob, *, num_top: int) -> dict[str, float]:
    """Keeps the likeliest of tokens that look alike (parts of characters), but the drawn one has its own value."""
    top: dict[str, float] = {}
    for token_id, logprob in entry.top[:num_top]:
        top.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    top[tokenizer.token_text(entry.token_id)] = _finite(entry.logprob)
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
