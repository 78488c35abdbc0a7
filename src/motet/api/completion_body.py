"""Completions answered in one piece; the place where `best_of` chooses."""

from collections.abc import Callable, Sequence

import msgspec

from motet.api.collect import WholeChoice, WholeGroup
from motet.api.echo import Echoes
from motet.api.open_groups import Step
from motet.api.plan import Plan
from motet.api.usage_shape import UsageShape, usage_shape
from motet.text.logprobs import CompletionLogprobs, completion_logprobs, joined
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage
from motet.transfer.ticket import Ticket
from motet.types import FinishReason


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageShape
    kv_transfer_params: Ticket | None


class CompletionBody:
    streams = False

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer,
        *,
        num_sent: int,
        num_top: int | None,
        token_ids: bool,
        echoes: Echoes | None,
    ) -> None:
        """`num_sent`: choices of each prompt to send, the best ones; `num_top`: None without log-probabilities."""
        self._plan = plan
        self._groups = [WholeGroup(plan.group_size) for _ in plan.groups]
        self._tokenizer = tokenizer
        self._num_sent = num_sent
        self._num_top = num_top
        self._token_ids = token_ids
        self._echoes = echoes

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            self._groups[step.group].feed(step)
        return b""

    def close(self, usage: Usage) -> bytes:
        head = self._plan.head
        completion = Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[
                self._choice(number, rank, choice)
                for number, group in enumerate(self._groups)
                for rank, choice in enumerate(group.best(self._num_sent))
            ],
            usage=usage_shape(usage),
            kv_transfer_params=self._groups[0].ticket,
        )
        return msgspec.json.encode(completion)

    def _choice(self, group: int, rank: int, choice: WholeChoice) -> CompletionChoice:
        return CompletionChoice(
            index=group * self._num_sent + rank,
            text=(self._echoes.text(group) if self._echoes else "") + choice.text,
            logprobs=self._logprobs(group, choice),
            finish_reason=choice.finish,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._token_ids else msgspec.UNSET,
            prompt_token_ids=self._plan.groups[group].prompt if self._token_ids else msgspec.UNSET,
        )

    def _logprobs(self, group: int, choice: WholeChoice) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        base = len(self._echoes.text(group)) if self._echoes else 0
        answer = completion_logprobs(self._tokenizer, choice.logprobs, choice.offsets, num_top=self._num_top, base=base)
        prompt = self._echoes.logprobs(group, self._groups[group].prompt) if self._echoes else None
        return answer if prompt is None else joined(prompt, answer)
