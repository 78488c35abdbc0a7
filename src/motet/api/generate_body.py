"""Token ids answered in one piece, in vLLM's shape."""

from collections.abc import Callable, Sequence

import msgspec

from motet.api.collect import WholeChoice, WholeGroup
from motet.api.open_groups import Step
from motet.api.plan import Plan
from motet.api.token_logprobs import TokenLogprobs, token_logprobs
from motet.api.usage_shape import UsageShape, usage_shape
from motet.text.logprobs import LOWEST
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, TokenLogprob


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's `Logprob`."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int]


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    choices: list[GeneratedChoice]
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None
    kv_transfer_params: Ticket | None
    usage: UsageShape


class TokensBody:
    streams = False

    def __init__(self, plan: Plan, request_id: str, tokenizer: Tokenizer, *, num_top: int | None) -> None:
        self._request_id = request_id
        self._group = WholeGroup(plan.group_size)
        self._tokenizer = tokenizer
        self._num_top = num_top

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            self._group.feed(step)
        return b""

    def close(self, usage: Usage) -> bytes:
        generated = Generated(
            request_id=self._request_id,
            choices=[self._choice(choice) for choice in self._group.choices],
            prompt_logprobs=self._prompt_logprobs(),
            kv_transfer_params=self._group.ticket,
            usage=usage_shape(usage),
        )
        return msgspec.json.encode(generated)

    def _choice(self, choice: WholeChoice) -> GeneratedChoice:
        return GeneratedChoice(
            index=choice.index,
            logprobs=None if self._num_top is None else token_logprobs(choice.logprobs, num_top=self._num_top),
            finish_reason=choice.finish,
            token_ids=choice.token_ids,
        )

    def _prompt_logprobs(self) -> list[dict[int, PromptLogprob] | None] | None:
        report = self._group.prompt
        if report is None or report.logprobs is None:
            return None
        return [None if entry is None else self._alternatives(entry) for entry in report.logprobs]

    def _alternatives(self, entry: TokenLogprob) -> dict[int, PromptLogprob]:
        """The prompt's token first, then the likeliest, as vLLM orders them."""
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
        every = {entry.token_id: (entry.logprob, entry.rank)} | ranked
        return {
            token: PromptLogprob(max(logprob, LOWEST), rank, self._tokenizer.token_text(token))
            for token, (logprob, rank) in every.items()
        }
