"""Log-probabilities in the forms of OpenAI's two APIs (chat and completions) and in vLLM's forms, and the echo of a
prompt.

The engine returns a `TokenLogprob` for each token. These functions turn them into the JSON objects of each API.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from motet.text.detokenize import Detokenizer
from motet.text.tokenizer import Tokenizer
from motet.types import TokenLogprob

LOWEST = -9999.0
"""Value for minus infinity, which JSON cannot represent. OpenAI and vLLM use the same value."""
ChatLogprob = dict[str, object]
"""Element of `logprobs.content` of a chat choice, or of the `top_logprobs` of such an element."""
CompletionLogprobs = dict[str, list[object]]
"""`logprobs` of a completions choice. All lists have the same length."""


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, num_top: int, as_ids: bool = False
) -> list[ChatLogprob]:
    """Returns the form of the chat API. `as_ids`: tokens are named `token_id:5`, as in vLLM, with the same bytes."""

    def entry_of(token_id: int, logprob: float) -> ChatLogprob:
        name, content = _name(tokenizer, token_id, as_ids=as_ids), tokenizer.token_bytes(token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(content)}

    return [
        {
            **entry_of(entry.token_id, entry.logprob),
            "top_logprobs": [entry_of(id, value) for id, value in entry.top[:num_top]],
        }
        for entry in logprobs
    ]


def id_logprobs(logprobs: Sequence[TokenLogprob], *, num_top: int, ranked: bool = True) -> list[ChatLogprob]:
    """Returns vLLM's form for tokens without text, with the id and the rank of each token, and with the fields of the
    chat form, which earlier versions of vLLM returned. With `num_top` 0, `top_logprobs` has the sampled token, as in
    vLLM. `ranked`: False if the other tokens are not the most likely."""

    def entry_of(token_id: int, logprob: float, *, rank: int | None) -> ChatLogprob:
        token, value = as_id(token_id), _finite(logprob)
        return {"token_id": token_id, "logprob": value, "rank": rank, "token": token, "bytes": None}

    def listed(entry: TokenLogprob) -> dict[str, object]:
        own = entry_of(entry.token_id, entry.logprob, rank=entry.rank)
        top = [
            entry_of(id, value, rank=rank if ranked else None)
            for rank, (id, value) in enumerate(entry.top[:num_top], start=1)
        ]
        return {**own, "top_logprobs": top if num_top else [own]}

    return [*map(listed, logprobs)]


def text_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, num_top: int, ranked: bool = True
) -> list[ChatLogprob]:
    """Returns the form of the chat API, with the id and the rank of each token in addition. `ranked`: see
    `id_logprobs`."""

    def entry_of(token_id: int, logprob: float, *, rank: int | None) -> ChatLogprob:
        name, content = tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))
        return {"token_id": token_id, "token": name, "logprob": _finite(logprob), "rank": rank, "bytes": content}

    def listed(entry: TokenLogprob) -> ChatLogprob:
        top = enumerate(entry.top[:num_top], start=1)
        return {
            **entry_of(entry.token_id, entry.logprob, rank=entry.rank),
            "top_logprobs": [entry_of(id, value, rank=rank if ranked else None) for rank, (id, value) in top],
        }

    return [*map(listed, logprobs)]


def as_id(token_id: int) -> str:
    """Returns vLLM's name of a token for clients that must not interpret it as text."""
    return f"token_id:{token_id}"


def _name(tokenizer: Tokenizer, token_id: int, *, as_ids: bool) -> str:
    return as_id(token_id) if as_ids else tokenizer.token_text(token_id)


class PromptEcho(msgspec.Struct, frozen=True):
    """The text of a prompt for the field `echo`."""

    text: str
    offsets: tuple[int, ...]
    """Start of each token's text."""


def echo(tokenizer: Tokenizer, prompt: Sequence[int], *, text: str | None = None, added: bool = True) -> PromptEcho:
    """Returns the echo of a prompt, with special tokens. `text`: the prompt if it was sent as text, which is repeated
    unchanged. `added`: True if the tokenizer added special tokens to it, which have no text."""
    first, last = tokenizer.num_added if text is not None and added else (0, 0)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    shown, offsets, held, start = list[str](), [0] * first, list[int](), 0

    def complete(piece: str) -> None:
        nonlocal start
        offsets.extend(start + own for own in detokenizer.starts(held, piece))
        held.clear()
        shown.append(piece)
        # A tokenizer can add a space after a special token, which the text does not have.
        extra = text is not None and not text.startswith(piece, start) and text.startswith(piece[1:], start)
        start += len(piece) - extra

    for token_id in prompt[first : len(prompt) - last]:
        held.append(token_id)
        if piece := detokenizer.feed(token_id):
            complete(piece)
    complete(detokenizer.close())
    whole = "".join(shown) if text is None else text
    return PromptEcho(whole, (*offsets, *[len(whole)] * last))


def completion_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    logprobs: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    num_top: int,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Returns the form of the completions API, for an answer or for an echoed prompt, whose first token has no
    log-probability. The top tokens start with the token itself, as in vLLM, whatever its rank is.
    `as_ids`: tokens are named `token_id:5`, as in vLLM; the offsets still refer to the text."""
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
    """Returns vLLM's form for a prompt: for each token except the first, the token itself and then the most likely
    tokens at its position, by their ids."""

    def entry_of(entry: TokenLogprob) -> dict[int, dict[str, object]]:
        top = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:num_top], start=1)}
        listed = {entry.token_id: (entry.logprob, entry.rank)} | top
        return {
            token: {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}
            for token, (logprob, rank) in listed.items()
        }

    return [None if entry is None else entry_of(entry) for entry in logprobs]


def _top_by_name(entry: TokenLogprob, name: Callable[[int], str], *, num_top: int) -> dict[str, float]:
    """Returns log-probabilities by the names of the tokens, the sampled token first. Of several tokens with the same
    name (parts of characters), the sampled token or else the most likely one is listed."""
    top = {name(entry.token_id): _finite(entry.logprob)}
    for token_id, logprob in entry.top[:num_top]:
        top.setdefault(name(token_id), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
