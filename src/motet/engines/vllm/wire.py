"""What a vLLM server answers while it generates: server-sent events, read however they were cut. Pure.

data: {"choices": [{"index", "token_ids", "logprobs", "finish_reason", "stop_reason"}], ...}    a Piece a choice
data: {"choices": [], "usage": {...}}                                                          Usage, once
data: {"error": {...}}                                                                         a MotetError
data: [DONE]
"""

from dataclasses import dataclass

from motet.engines.vllm.ask import Dialect
from motet.types import Finish, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """What was added to one child."""

    index: int
    token_ids: tuple[int, ...]
    """The token that ends a choice is among them."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """As long as `token_ids` when asked for. `/v1/completions` tells no rank: that of a token which is not among the k
    best is said to be k + 1."""
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Comes at the end."""

    prompt_tokens: int
    cached_tokens: int | None
    """None: the server does not tell (it does with `--enable-prompt-tokens-details`)."""


class Reader:
    """Reads one answer. Raises MotetError for errors in mid-stream and for nonsense; then nothing more can be read."""

    def __init__(self, dialect: Dialect, sampling: SamplingParams) -> None:
        """`sampling`: of the `Ask` that is answered."""
        self.done = False
        """Whether the server said that this is all."""
        self._dialect = dialect
        self._sampling = sampling

    def feed(self, data: bytes) -> list[Piece | Usage]:
        """What `data` completes, in order."""
        raise NotImplementedError
