"""The results of the Python API, with vLLM's names."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of a token at one position."""

    logprob: float
    """Natural logarithm of the probability; -9999 for a token that cannot be sampled."""
    rank: int | None = None
    """1 for the most likely token of the vocabulary. None if it is not known."""
    decoded_token: str | None = None
    """Text of the token alone; None for answers without text."""


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities at one position by token id: the token itself first, then the most likely tokens, best first."""


class FunctionCall(msgspec.Struct, frozen=True):
    """The function of a tool call."""

    name: str
    arguments: str
    """A JSON object as text."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an answer of a chat, in OpenAI's form."""

    id: str
    function: FunctionCall
    type: str = "function"


@dataclass(kw_only=True)
class CompletionOutput:
    """One choice of a prompt."""

    index: int
    """Number of the choice, from 0. The choices of a prompt are in this order."""
    text: str
    """Text of the output tokens, without a stop string or an end token. In a chat with reasoning or tool calls, it is
    the complete text with their tags; `content` is the message without them."""
    token_ids: list[int]
    """Output tokens, with the tokens of a stop string and the end-of-sequence token."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of `token_ids`; None if they were not requested."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each of `token_ids`; None if they were not requested."""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls`, or `abort` if the client or a policy ended the choice. None while it runs."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice; None for the end-of-sequence token."""
    content: str | None = None
    """Message of a chat without reasoning and tool calls; None if the message has no other text."""
    reasoning: str | None = None
    """Reasoning of the model in a chat; None if there is none."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Tool calls of the message of a chat."""

    def finished(self) -> bool:
        """Returns True if the choice has ended."""
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    """Id of the request in the log of the server."""
    prompt: str | None
    """Text of the prompt; None if it was given as token ids."""
    prompt_token_ids: list[int] | None
    """Token ids of the prompt. None for a prompt that was interrupted before it was tokenised."""
    outputs: list[CompletionOutput]
    """The choices in the order of their indices. With a `group` policy, choices that never started are left out."""
    finished: bool = True
    """False in a step of a stream before the last one, and for a prompt that was interrupted."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry for each token of the prompt, None for the first token; None if they were not requested."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that were not computed, because they were in the prefix cache; None if not known."""
    group: Mapping[str, object] | None = None
    """Report on a group with a policy: docs/steering.md."""
    kept: "KeptPrompt | None" = None
    """The prompt on the server, for requests with `keep_s`."""


@dataclass(frozen=True, kw_only=True)
class KeptPrompt:
    """A prompt whose KV cache the server keeps for `SamplingParams.keep_s` seconds after its answers."""

    id: str
    """Id of the group: `GET /v1/groups/{id}` reports its state."""
    generate_more: Callable[[int], Awaitable[RequestOutput]]
    """Generates more choices in the event loop of the `AsyncLLM`."""
    wait: "Callable[[Awaitable[RequestOutput]], RequestOutput] | None" = None
    """Waits for a result in another thread; None for a prompt of an `AsyncLLM`."""

    def more(self, n: int) -> RequestOutput:
        """Returns `n` more choices of the prompt. Their indices and seeds continue, so together with the earlier ones
        they are the choices of one request with a larger `n`.

        Only for prompts of an `LLM`; the prompts of an `AsyncLLM` have `more_async`. Raises NotFoundError if the server
        has dropped the prompt."""
        if self.wait is None:
            raise RuntimeError("this prompt belongs to an AsyncLLM: await kept.more_async(n)")
        return self.wait(self.generate_more(n))

    async def more_async(self, n: int) -> RequestOutput:
        """Returns `n` more choices, as `more`, for prompts of an `AsyncLLM`."""
        return await self.generate_more(n)


@dataclass(frozen=True, kw_only=True)
class ContinuationScore:
    """The log-probabilities of one continuation of a prompt, in the model's own distribution."""

    index: int
    logprob: float
    """Sum of `token_logprobs`."""
    mean_logprob: float
    """Mean of `token_logprobs`, which does not depend on the number of tokens."""
    is_greedy: bool
    """True if each token is the most likely one at its position."""
    token_ids: Sequence[int]
    token_logprobs: Sequence[float]
    """One for each of `token_ids`."""


@dataclass(frozen=True, kw_only=True)
class ScoreOutput:
    """The scores of continuations of one prompt."""

    request_id: str
    scores: list[ContinuationScore]
    """One for each continuation, in their order."""
    num_cached_tokens: int | None = None
    """Number of tokens that were not computed, summed over the continuations."""
