"""Log-probabilities in the two forms that OpenAI has, for chat and for completions, and in vLLM's form for tokens
without text; and the echo of a prompt."""

from collections.abc import Callable, Sequence
from functools import partial

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


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, num_top: int, as_ids: bool = False
) -> list[ChatLogprob]:
    """`as_ids`: tokens are written as `token_id:5`, as in vLLM; their bytes stay."""

    def entry_of(token_id: int, logprob: float) -> ChatLogprob:
        name, written = _name(tokenizer, token_id, as_ids=as_ids), tokenizer.token_bytes(token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(written)}

    return [
        {
            **entry_of(entry.token_id, entry.logprob),
            "top_logprobs": [entry_of(id, value) for id, value in entry.top[:num_top]],
        }
        for entry in logprobs
    ]


def id_logprobs(logprobs: Sequence[TokenLogprob], *, num_top: int, ranked: bool = True) -> list[ChatLogprob]:
    """Returns the form for tokens without text: vLLM's, with the number of each token and its rank, and beside them the
    fields of the chat form, which vLLM had there before. `ranked`: False if the other tokens are not the likeliest."""

    def entry_of(token_id: int, logprob: float, *, rank: int | None) -> ChatLogprob:
        named = {"token_id": token_id, "logprob": _finite(logprob), "rank": rank}
        return named | {"token": as_id(token_id), "bytes": None}

    return [
        {
            **entry_of(entry.token_id, entry.logprob, rank=entry.rank),
            "top_logprobs": [
                entry_of(id, value, rank=rank if ranked else None)
                for rank, (id, value) in enumerate(entry.top[:num_top], start=1)
            ],
        }
        for entry in logprobs
    ]


def as_id(token_id: int) -> str:
    """Returns a token as vLLM spells it where it must not be read as text."""
    return f"token_id:{token_id}"


def _name(tokenizer: Tokenizer, token_id: int, *, as_ids: bool) -> str:
    return as_id(token_id) if as_ids else tokenizer.token_text(token_id)


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
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Returns the form for an answer, or for an echoed prompt, whose first token has no log-probability.

    The top tokens include the token itself, as the last one if it is not among the `num_top`. `as_ids`: tokens are
    written as `token_id:5`, as in vLLM; the offsets stay those of the text.
    """
    name = partial(_name, tokenizer, as_ids=as_ids)
    return {
        "tokens": [name(token_id) for token_id in ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [None if one is None else _top_by_name(one, name, num_top=num_top) for one in logprobs],
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


def _top_by_name(entry: TokenLogprob, name: Callable[[int], str], *, num_top: int) -> dict[str, float]:
    """Keeps the likeliest of tokens that look alike (parts of characters), but the drawn one has its own value."""
    top: dict[str, float] = {}
    for token_id, logprob in entry.top[:num_top]:
        top.setdefault(name(token_id), _finite(logprob))
    top[name(entry.token_id)] = _finite(entry.logprob)
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
