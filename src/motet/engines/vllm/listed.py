"""Log-probabilities as vLLM lists them, in each of its three forms. Pure.

A list holds the drawn token (or the prompt's) first, then the k best but for it, best first. So it has k + 1 entries if
that token is not among the k best, and k if it is.

    /v1/completions           {"token_logprobs": [-0.1], "top_logprobs": [{"token_id:5": -0.1, "token_id:7": -2.0}]}
    /inference/v1/generate    {"content": [{"token_id", "logprob", "rank", "top_logprobs": [...]}]}
    prompt_logprobs           [null, {"5": {"logprob", "rank", "decoded_token"}, ...}]                of either route
"""

from collections.abc import Sequence

import msgspec

from motet.engines.vllm.ask import TOKEN_PREFIX
from motet.engines.wire import UNREADABLE
from motet.errors import EngineError
from motet.types import TokenLogprob

LOWEST = -9999.0
"""vLLM's word for minus infinity; what is no number at all (null) is taken for it too."""

_PREFIX_LENGTH = len(TOKEN_PREFIX)

Entry = tuple[int, float]
"""Token id and log-probability."""


class CompletionLogprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]

    def of(self, tokens: Sequence[int], k: int) -> tuple[TokenLogprob, ...]:
        drawn = zip(tokens, self.token_logprobs, self.top_logprobs, strict=False)
        return tuple([_from_texts(token, logprob, top or {}, k) for token, logprob, top in drawn])


class _Best(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None


class _Content(_Best, gc=False):
    rank: int | None = None
    top_logprobs: tuple[_Best, ...] = ()


class GenerateLogprobs(msgspec.Struct, gc=False):
    content: tuple[_Content, ...] | None = None

    def of(self, tokens: Sequence[int], k: int) -> tuple[TokenLogprob, ...]:
        return tuple([_from_content(content, k) for content in self.content or ()])


class _PromptLogprob(msgspec.Struct, gc=False):
    logprob: float | None
    rank: int | None = None


PromptLogprobs = list[dict[int, _PromptLogprob] | None]


class _Choice(msgspec.Struct):
    prompt_logprobs: PromptLogprobs | None = None


class _Answer(msgspec.Struct):
    """`/v1/completions` tells it of the choice, `/inference/v1/generate` of the whole."""

    choices: list[_Choice]
    prompt_logprobs: PromptLogprobs | None = None


def prompt_logprobs_in(body: bytes, prompt: Sequence[int], k: int) -> tuple[TokenLogprob | None, ...]:
    """Of the answer to a `prompt_ask`: one for each token, None for the first. Raises EngineError."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except UNREADABLE as error:
        raise EngineError(f"vLLM answered a question for prompt_logprobs with what cannot be read: {error}") from error
    listed = answer.prompt_logprobs or next((choice.prompt_logprobs for choice in answer.choices), None)
    if listed is None or len(listed) != len(prompt):
        raise EngineError(f"vLLM told the log-probabilities of {len(listed or ())} of {len(prompt)} prompt tokens")
    return tuple([_of_prompt(token, entry, k) if entry else None for token, entry in zip(prompt, listed, strict=True)])


def _from_texts(token: int, logprob: float | None, top: dict[str, float | None], k: int) -> TokenLogprob:
    try:
        listed = [(int(key[_PREFIX_LENGTH:]), _number(value)) for key, value in top.items()]
    except ValueError as error:
        raise EngineError(f"vLLM lists log-probabilities of {list(top)[:3]}, which are no token ids") from error
    drawn = _number(logprob)
    others = [entry for entry in listed if entry[0] != token]
    rank = 1 + sum(other > drawn for _, other in others)  # k + 1 for one that is not among the k best
    return _told(token, drawn, rank, others, k)


def _from_content(content: _Content, k: int) -> TokenLogprob:
    others = [
        (best.token_id, _number(best.logprob)) for best in content.top_logprobs if best.token_id != content.token_id
    ]
    return _told(content.token_id, _number(content.logprob), content.rank or k + 1, others, k)


def _of_prompt(token: int, entry: dict[int, _PromptLogprob], k: int) -> TokenLogprob:
    own = entry.get(token)
    if own is None:
        raise EngineError(f"vLLM tells no log-probability of prompt token {token}")
    others = [(other, _number(listed.logprob)) for other, listed in entry.items() if other != token]
    return _told(token, _number(own.logprob), own.rank or k + 1, others, k)


def _told(token: int, logprob: float, rank: int, others: list[Entry], k: int) -> TokenLogprob:
    """`others`: the best without this token, best first."""
    if rank <= k:
        others.insert(rank - 1, (token, logprob))
    return TokenLogprob(token, logprob, rank, tuple(others[:k]))


def _number(logprob: float | None) -> float:
    return LOWEST if logprob is None else logprob
